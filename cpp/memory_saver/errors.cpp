#include "errors.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core.hpp"

namespace vmmgraph::memory_saver {

namespace {

// Without destructors: a thread may fail after its thread-locals are destroyed.
thread_local int last_code = success;
thread_local char last_text[512] = "";

void note(int code, const char* format, std::va_list arguments) noexcept {
    last_code = code;
    std::vsnprintf(last_text, sizeof last_text, format, arguments);
}

int runtime_code(vmmgraph_status_t status) noexcept {
    switch (status) {
        case VMMGRAPH_OK:
            return success;
        case VMMGRAPH_ERROR_INVALID_SIZE:  // Above 2^46: more than any device has.
        case VMMGRAPH_ERROR_OUT_OF_MEMORY:
        case VMMGRAPH_ERROR_OVER_BUDGET:
        case VMMGRAPH_ERROR_OUT_OF_ADDRESSES:
        case VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS:
        case VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY:
            return out_of_memory;
        case VMMGRAPH_ERROR_STREAM_CAPTURING:
            return capturing;
        case VMMGRAPH_ERROR_WRONG_STATE:
            return illegal_state;
        case VMMGRAPH_ERROR_UNSUPPORTED:
            return not_supported;
        case VMMGRAPH_ERROR_DRIVER_MISSING:
        case VMMGRAPH_ERROR_DRIVER_TOO_OLD:
        case VMMGRAPH_ERROR_INVALID_DEVICE:
            return not_initialized;
        case VMMGRAPH_ERROR_DRIVER: {
            // The runtime uses the driver's error numbers.
            vmmgraph_error_info_t info{};
            info.struct_size = sizeof info;
            const bool known =
                Core::found().last_error(&info) == VMMGRAPH_OK && info.driver_result > 0;
            return known ? info.driver_result : unknown;
        }
        default:
            return unknown;
    }
}

}  // namespace

int fail(int code, const char* format, ...) noexcept {
    std::va_list arguments;
    va_start(arguments, format);
    note(code, format, arguments);
    va_end(arguments);
    return code;
}

int fail_aloud(int code, const char* format, ...) noexcept {
    std::va_list arguments;
    va_start(arguments, format);
    note(code, format, arguments);
    va_end(arguments);
    const char* const log = std::getenv("VMMGRAPH_LOG");
    if (log == nullptr || std::strcmp(log, "off") != 0) {
        std::fprintf(stderr, "vmmgraph memory saver: %s\n", last_text);
    }
    return code;
}

int fail_with(vmmgraph_status_t status) noexcept {
    const int code = runtime_code(status);
    if (code != success) {
        char text[400] = "";
        static_cast<void>(Core::found().last_error_message(text, sizeof text, nullptr));
        return fail(code, "%s", text);
    }
    return code;
}

int take_last(const char** message) noexcept {
    if (message != nullptr) {
        *message = last_code == success ? "" : last_text;
    }
    const int code = last_code;
    last_code = success;
    return code;
}

}  // namespace vmmgraph::memory_saver
