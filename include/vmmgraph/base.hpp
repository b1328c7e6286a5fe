// Common parts of the C++17 headers: errors, handle owners, logging. Conventions: vmmgraph.hpp.

#ifndef VMMGRAPH_BASE_HPP
#define VMMGRAPH_BASE_HPP

#if __cplusplus < 201703L
#error "VmmGraph's .hpp headers need C++17; vmmgraph.h needs C only"
#endif
#ifndef __cpp_exceptions
#error "VmmGraph's .hpp headers need exceptions; vmmgraph.h does not"
#endif

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "vmmgraph.h"

namespace vmmgraph {

// Numbers of a failure: status, driver_result, device, requested, available.
using ErrorInfo = vmmgraph_error_info_t;

// A failed call. `what()` is the library's message, with the value and the limit.
class VMMGRAPH_API Error : public std::runtime_error {
public:
    // Constructed by the library's wrappers; callers only catch errors.
    Error(const std::string& message, const ErrorInfo& info)
        : std::runtime_error(message), info_(info) {}

    // One of the VMMGRAPH_ERROR numbers.
    [[nodiscard]] vmmgraph_status_t status() const noexcept { return info_.status; }
    // The failure's numbers; fields without meaning are 0, the device -1.
    [[nodiscard]] const ErrorInfo& info() const noexcept { return info_; }

private:
    ErrorInfo info_;
};

// Memory, budget, addresses or file descriptors ran out (statuses 200 to 203). Nothing has changed,
// and all objects stay usable. Exhausted host memory (204) is a plain Error.
class VMMGRAPH_API OutOfMemory : public Error {
public:
    using Error::Error;
};
// Detail of the log.
enum class LogLevel : std::int32_t {
    off = VMMGRAPH_LOG_OFF,
    // A failure which could not be undone.
    error = VMMGRAPH_LOG_ERROR,
    // A failure which was undone, or memory the driver refused to take back.
    warn = VMMGRAPH_LOG_WARN,
    // Devices and arenas are created and destroyed.
    info = VMMGRAPH_LOG_INFO,
    // Captures and their memory.
    debug = VMMGRAPH_LOG_DEBUG,
    trace = VMMGRAPH_LOG_TRACE,
};

namespace detail {

template <class Struct>
[[nodiscard]] Struct sized() noexcept {
    Struct value{};
    value.struct_size = sizeof(Struct);
    return value;
}

// Returns the text of a function which copies into (buffer, capacity, needed), with retries while
// the text grows.
template <class Read>
[[nodiscard]] std::string read_text(Read&& read) {
    std::string text(255, '\0');
    for (;;) {
        std::size_t needed = 1;
        read(text.data(), text.size() + 1, &needed);
        const bool fits = needed <= text.size() + 1;
        text.resize(needed - 1);
        if (fits) {
            return text;
        }
    }
}

[[noreturn]] inline void fail(vmmgraph_status_t status) {
    auto info = sized<ErrorInfo>();
    std::string message;
    if (vmmgraph_last_error(&info) == VMMGRAPH_OK && info.status == status) {
        message = read_text([](char* buffer, std::size_t capacity, std::size_t* needed) {
            static_cast<void>(vmmgraph_last_error_message(buffer, capacity, needed));
        });
    } else {
        // The thread is ending and no longer keeps details.
        info = sized<ErrorInfo>();
        info.status = status;
        info.device = -1;
    }
    message =
        "vmmgraph: " + (message.empty() ? std::string(vmmgraph_status_name(status)) : message);
    if (status >= VMMGRAPH_ERROR_OUT_OF_MEMORY && status <= VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS) {
        throw OutOfMemory(message, info);
    }
    throw Error(message, info);
}

inline void check(vmmgraph_status_t status) {
    if (status != VMMGRAPH_OK) {
        fail(status);
    }
}

// Throws if the loaded library's ABI version differs from the compiled header's.
inline void require_abi() {
    const std::uint32_t loaded = vmmgraph_abi_version();
    if (loaded == VMMGRAPH_ABI_VERSION) {
        return;
    }
    auto info = sized<ErrorInfo>();
    info.status = VMMGRAPH_ERROR_ABI_MISMATCH;
    info.device = -1;
    info.requested = VMMGRAPH_ABI_VERSION;
    info.available = loaded;
    throw Error("vmmgraph: cannot use library " + std::string(vmmgraph_version()) +
                    ": it has ABI " + std::to_string(loaded) + " and the headers have ABI " +
                    std::to_string(VMMGRAPH_ABI_VERSION) +
                    "; compile with the headers of the library",
                info);
}

// A handle with one owner.
template <class Handle, vmmgraph_status_t (*Destroy)(Handle)>
class Owned {
public:
    Owned() noexcept = default;
    explicit Owned(Handle handle) noexcept : handle_(handle) {}
    Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Owned& operator=(Owned&& other) noexcept {
        // This order makes self-move a no-op.
        const Handle taken = std::exchange(other.handle_, nullptr);
        const Owned old(std::exchange(handle_, taken));
        return *this;
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
        if (handle_ != nullptr) {
            // A destructor cannot report: the library logs refused memory and retries at the next
            // trim.
            static_cast<void>(Destroy(handle_));
        }
    }
    [[nodiscard]] Handle get() const noexcept { return handle_; }
    [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, nullptr); }

private:
    Handle handle_ = nullptr;
};

}  // namespace detail

// Version of the loaded library, "major.minor.patch". Static; never fails.
[[nodiscard]] inline std::string_view version() noexcept { return vmmgraph_version(); }

// Sends the library's log lines up to `max_level` to `sink`; an empty function stops the log. The
// sink may be called on any thread, concurrently, with no lock of the library held, and must not
// call VmmGraph functions. Exceptions are dropped. Lines arrive before the causing call returns
// (vmmgraph_log_fn). A replaced sink is destroyed after its last call.
inline void set_log_sink(std::function<void(LogLevel, std::string_view)> sink,
                         LogLevel max_level = LogLevel::info) {
    using Sink = std::function<void(LogLevel, std::string_view)>;
    if (!sink) {
        detail::check(vmmgraph_set_log_sink(nullptr, nullptr, nullptr, VMMGRAPH_LOG_OFF));
        return;
    }
    const vmmgraph_log_fn write = [](std::int32_t level, const char* text, std::size_t length,
                                     void* user) noexcept {
        try {
            (*static_cast<Sink*>(user))(static_cast<LogLevel>(level),
                                        std::string_view(text, length));
        } catch (...) {
            // Logging never fails a call.
        }
    };
    const vmmgraph_drop_fn drop = [](void* user) noexcept { delete static_cast<Sink*>(user); };
    auto owned = std::make_unique<Sink>(std::move(sink));
    detail::check(
        vmmgraph_set_log_sink(write, owned.release(), drop, static_cast<std::int32_t>(max_level)));
}

}  // namespace vmmgraph

#endif  // VMMGRAPH_BASE_HPP
