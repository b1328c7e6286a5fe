// Failures as CUDA runtime error codes, with text for tms_last_error. cudaError_t is an int in the
// C ABI, so no CUDA header is needed.
#pragma once

#include <new>
#include <vmmgraph/vmmgraph.h>

namespace vmmgraph::memory_saver {

enum Code : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    file_not_found = 301,
    symbol_not_found = 302,
    operating_system = 304,
    illegal_state = 401,
    not_supported = 801,
    capturing = 900,
    capture_implicit = 906,
    unknown = 999,
};

// Stores this thread's failure and returns `code`.
[[gnu::format(printf, 2, 3)]] int fail(int code, const char* format, ...) noexcept;

// Like fail(), and prints to stderr unless VMMGRAPH_LOG is "off". For functions without a return
// value.
[[gnu::format(printf, 2, 3)]] int fail_aloud(int code, const char* format, ...) noexcept;

// Stores the failure of this thread's last VmmGraph call.
int fail_with(vmmgraph_status_t status) noexcept;

// Returns this thread's last failure and its text, and clears it.
int take_last(const char** message) noexcept;

template <class Body>
int guarded(Body&& body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(
            out_of_memory,
            "cannot complete the call: out of host memory; free host memory and repeat the call");
    } catch (...) {
        return fail(unknown,
                    "cannot complete the call: an exception of an unknown type arrived; report "
                    "this message");
    }
}

}  // namespace vmmgraph::memory_saver
