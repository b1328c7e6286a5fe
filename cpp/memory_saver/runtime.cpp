#include "runtime.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "captures.hpp"
#include "errors.hpp"

namespace vmmgraph::memory_saver {

namespace {

template <class Function>
bool look_up(void* where, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(where, name));
    return function != nullptr;
}

bool load(void* where, Runtime& runtime) {
    return look_up(where, "cudaMalloc", runtime.malloc) &&
           look_up(where, "cudaFree", runtime.free) &&
           look_up(where, "cudaGetDevice", runtime.get_device) &&
           look_up(where, "cudaSetDevice", runtime.set_device) &&
           look_up(where, "cudaMemGetInfo", runtime.mem_get_info) &&
           look_up(where, "cudaDeviceSynchronize", runtime.device_synchronize) &&
           look_up(where, "cudaStreamIsCapturing", runtime.stream_is_capturing) &&
           look_up(where, "cudaGetLastError", runtime.get_last_error) &&
           look_up(where, "cudaStreamBeginCapture", runtime.stream_begin_capture) &&
           look_up(where, "cudaStreamEndCapture", runtime.stream_end_capture);
}

bool load_all(void* where, Runtime& runtime) {
    static_cast<void>(
        look_up(where, "cudaStreamBeginCaptureToGraph", runtime.stream_begin_capture_to_graph));
    static_cast<void>(look_up(where, "cudaMemcpy", runtime.memcpy));
    static_cast<void>(look_up(where, "cudaHostRegister", runtime.host_register) &&
                      look_up(where, "cudaHostUnregister", runtime.host_unregister));
    return load(where, runtime);
}

int note_runtime(dl_phdr_info* info, std::size_t, void* into) {
    const char* const slash = std::strrchr(info->dlpi_name, '/');
    const char* const name = slash == nullptr ? info->dlpi_name : slash + 1;
    if (std::strncmp(name, "libcudart", 9) == 0) {
        try {
            static_cast<std::vector<std::string>*>(into)->emplace_back(info->dlpi_name);
        } catch (...) {
            return 1;
        }
    }
    return 0;
}

// Loads the next runtime in load order, else one with local symbols, as loaded by Python.
bool load_any(Runtime& runtime) {
    if (load_all(RTLD_NEXT, runtime)) {
        return true;
    }
    std::vector<std::string> loaded;
    dl_iterate_phdr(note_runtime, &loaded);
    for (const std::string& path : loaded) {
        void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (library != nullptr && load_all(library, runtime)) {
            return true;
        }
    }
    return false;
}

class OnDevice {
public:
    OnDevice(const Runtime& runtime, int device) noexcept
        : runtime_(runtime), code_(runtime.get_device(&before_)) {
        if (code_ == success && before_ != device) {
            code_ = runtime.set_device(device);
            moved_ = code_ == success;
        }
    }
    ~OnDevice() {
        if (moved_) {
            static_cast<void>(runtime_.set_device(before_));
        }
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    [[nodiscard]] int code() const noexcept { return code_; }

private:
    const Runtime& runtime_;
    int before_ = 0;
    int code_;
    bool moved_ = false;
};

}  // namespace

const Runtime* Runtime::find() noexcept {
    // Never destroyed: cudaMalloc may run before and after this library's static objects exist.
    static std::atomic<const Runtime*> known{nullptr};
    if (const Runtime* const found = known.load(std::memory_order_acquire); found != nullptr) {
        return found;
    }
    try {
        auto* const found = new Runtime{};
        if (!load_any(*found)) {
            delete found;
            return nullptr;
        }
        const Runtime* expected = nullptr;
        if (!known.compare_exchange_strong(expected, found, std::memory_order_acq_rel)) {
            delete found;
            return expected;
        }
        return found;
    } catch (...) {
        return nullptr;
    }
}

int Runtime::wait_for(int device) const {
    const NoneBegins none_begins;
    if (none_begins.capturing(*this)) {
        return capturing;
    }
    const OnDevice there(*this, device);
    int code = there.code();
    int status = 0;
    if (code == success) {
        // The default stream's query covers all captures on blocking streams and invalidates none.
        code = stream_is_capturing(nullptr, &status);
    }
    if (code == success && status == 0) {
        code = device_synchronize();
    }
    if (code != success) {
        static_cast<void>(get_last_error());
    }
    return code == capture_implicit || status != 0 ? static_cast<int>(capturing) : code;
}

int Runtime::free_bytes(int device, std::size_t* bytes) const noexcept {
    const OnDevice there(*this, device);
    std::size_t total = 0;
    const int code = there.code() == success ? mem_get_info(bytes, &total) : there.code();
    if (code != success) {
        static_cast<void>(get_last_error());
    }
    return code;
}

int Runtime::copy(int device, void* to, const void* from, std::size_t bytes) const noexcept {
    const OnDevice there(*this, device);
    // cudaMemcpyDefault
    const int code = there.code() == success ? memcpy(to, from, bytes, 4) : there.code();
    if (code != success) {
        static_cast<void>(get_last_error());
    }
    return code;
}

bool Runtime::register_host(void* at, std::size_t bytes) const noexcept {
    // Portable: valid on every device.
    const int code =
        host_unregister == nullptr ? static_cast<int>(not_supported) : host_register(at, bytes, 1);
    if (code != success) {
        static_cast<void>(get_last_error());
    }
    return code == success;
}

void Runtime::unregister_host(void* at) const noexcept {
    if (host_unregister(at) != success) {
        static_cast<void>(get_last_error());
    }
}

void Runtime::set_out_of_memory() const noexcept {
    void* none = nullptr;
    if (malloc(&none, std::size_t{1} << 60) == success) {
        static_cast<void>(free(none));
    }
}

}  // namespace vmmgraph::memory_saver
