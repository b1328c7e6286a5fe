// Failures as the CUDA runtime's numbers, and in words for tms_last_error. cudaError_t is an int in the C ABI; no header of CUDA's is needed.
#pragma once

#include <new>
#include <vmmgraph/vmmgraph.h>

namespace vmmgraph::memory_saver {

// Of cudaError_t.
enum Code : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    symbol_not_found = 302,
    illegal_state = 401,
    not_supported = 801,
    capturing = 900,
    capture_implicit = 906,
    unknown = 999,
};

// Notes a failure of this thread; returns `code`.
[[gnu::format(printf, 2, 3)]] int fail(int code, const char* format, ...) noexcept;

// The same, and a line on stderr: for what no return value tells, unless VMMGRAPH_LOG is "off".
[[gnu::format(printf, 2, 3)]] int fail_aloud(int code, const char* format, ...) noexcept;

// Notes what this thread's last call of VmmGraph says; VMMGRAPH_OK is success.
int fail_with(vmmgraph_status_t status) noexcept;

// This thread's last failure, which is forgotten, and its text.
int take_last(const char** message) noexcept;

// What a C function does: no exception passes.
template <class Body>
int guarded(Body&& body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(out_of_memory, "no host memory");
    } catch (...) {
        return fail(unknown, "an unexpected exception");
    }
}

}  // namespace vmmgraph::memory_saver
