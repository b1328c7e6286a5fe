// The C functions: memory_saver.h, and the replacements for functions of the CUDA runtime.
#include <vmmgraph/memory_saver.h>

#include "captures.hpp"
#include "errors.hpp"
#include "forks.hpp"
#include "runtime.hpp"
#include "saver.hpp"
#include "settings.hpp"

namespace {

using namespace vmmgraph::memory_saver;

int no_runtime() noexcept {
    return fail(symbol_not_found,
                "cannot call CUDA: the program has no shared CUDA runtime; link libcudart as a "
                "shared library");
}

// Null and "" select all tags.
const char* chosen(const char* tag) noexcept {
    return tag != nullptr && *tag == '\0' ? nullptr : tag;
}

template <class Change>
void change(Change&& change) noexcept {
    guarded([&] {
        change(Settings::own());
        return static_cast<int>(success);
    });
}

template <class Value, class Get>
Value ask(Value otherwise, Get&& get) noexcept {
    guarded([&] {
        otherwise = get(Settings::own());
        return static_cast<int>(success);
    });
    return otherwise;
}

}  // namespace

extern "C" {

VMMGRAPH_API int cudaMalloc(void** ptr, size_t bytes) {
    return guarded([&]() -> int {
        const Runtime* const runtime = Runtime::find();
        if (runtime == nullptr) {
            return no_runtime();
        }
        const Settings& settings = Settings::own();
        if (ptr == nullptr || bytes == 0 || !settings.interesting) {
            return runtime->malloc(ptr, bytes);
        }
        int device = 0;
        if (const int code = runtime->get_device(&device); code != success) {
            return fail(code,
                        "cannot allocate: there is no current device (cudaError_t %d); select a "
                        "device first",
                        code);
        }
        const int code = Saver::instance().allocate(ptr, bytes, device, settings);
        if (code == out_of_memory) {
            runtime->set_out_of_memory();
        }
        return code;
    });
}

VMMGRAPH_API int cudaFree(void* ptr) {
    return guarded([&]() -> int {
        if (ptr != nullptr) {
            if (const auto freed = Saver::instance().free(ptr); freed.has_value()) {
                return *freed;
            }
        }
        const Runtime* const runtime = Runtime::find();
        return runtime == nullptr ? no_runtime() : runtime->free(ptr);
    });
}

VMMGRAPH_API int cudaStreamBeginCapture(void* stream, int mode) {
    return guarded([&]() -> int {
        const Runtime* const runtime = Runtime::find();
        if (runtime == nullptr) {
            return no_runtime();
        }
        const auto begin = [&](const Runtime& own) {
            return own.stream_begin_capture(stream, mode);
        };
        return begin_capture(*runtime, stream, begin);
    });
}

VMMGRAPH_API int cudaStreamBeginCaptureToGraph(void* stream, void* graph, const void* dependencies,
                                               const void* data, size_t count, int mode) {
    return guarded([&]() -> int {
        const Runtime* const runtime = Runtime::find();
        if (runtime == nullptr || runtime->stream_begin_capture_to_graph == nullptr) {
            return no_runtime();
        }
        const auto begin = [&](const Runtime& own) {
            return own.stream_begin_capture_to_graph(stream, graph, dependencies, data, count,
                                                     mode);
        };
        return begin_capture(*runtime, stream, begin);
    });
}

VMMGRAPH_API int cudaStreamEndCapture(void* stream, void** graph) {
    return guarded([&]() -> int {
        const Runtime* const runtime = Runtime::find();
        return runtime == nullptr ? no_runtime() : end_capture(*runtime, stream, graph);
    });
}

void tms_set_interesting_region(bool interesting) {
    change([&](Settings& own) { own.interesting = interesting; });
}

bool tms_get_interesting_region(void) {
    return ask(false, [](const Settings& own) { return own.interesting; });
}

void tms_set_current_tag(const char* tag) {
    if (tag == nullptr) {
        fail_aloud(invalid_value, "cannot set the current tag: the tag is null; pass a string");
        return;
    }
    change([&](Settings& own) { own.tag = tag_named(tag); });
}

const char* tms_get_current_tag(void) {
    return ask("default", [](const Settings& own) { return own.tag->c_str(); });
}

void tms_set_enable_cpu_backup(bool enable) {
    change([&](Settings& own) { own.backup = enable; });
}

bool tms_get_enable_cpu_backup(void) {
    return ask(false, [](const Settings& own) { return own.backup; });
}

void tms_set_cpu_backup_backend(const char* backend) {
    const char* const known = backend_named(backend);
    if (known == nullptr) {
        fail_aloud(
            invalid_value,
            "cannot set the CPU backup backend: %s is neither pinned nor mmap; pass one of these",
            backend == nullptr ? "null" : backend);
        return;
    }
    change([&](Settings& own) { own.backend = known; });
}

const char* tms_get_cpu_backup_backend(void) {
    return ask("pinned", [](const Settings& own) { return own.backend; });
}

void tms_set_enable_disk_backup(bool enable) {
    change([&](Settings& own) { own.disk = enable; });
}

bool tms_get_enable_disk_backup(void) {
    return ask(false, [](const Settings& own) { return own.disk; });
}

void tms_set_disk_backup_dir(const char* folder) {
    if (folder == nullptr || *folder == '\0') {
        fail_aloud(invalid_value,
                   "cannot set the folder of disk backups: its name is empty; pass a folder");
        return;
    }
    guarded([&] {
        set_disk_folder(folder);
        return static_cast<int>(success);
    });
}

int tms_pause(const char* tag) {
    return guarded([&] { return Saver::instance().pause(chosen(tag)); });
}

int tms_resume(const char* tag) {
    return guarded([&] { return Saver::instance().resume(chosen(tag)); });
}

uint8_t* tms_get_cpu_backup_pointer(const uint8_t* ptr, uint64_t bytes) {
    uint8_t* found = nullptr;
    guarded([&] {
        found = Saver::instance().backup(ptr, bytes);
        return static_cast<int>(success);
    });
    return found;
}

void tms_set_retain_cpu_backup(bool retain) { retain_backups().store(retain); }

bool tms_get_retain_cpu_backup(void) { return retain_backups().load(); }

void set_memory_margin_bytes(uint64_t bytes) { margin_bytes.store(bytes); }

void* tms_torch_malloc(ssize_t bytes, int device, void*) {
    void* block = nullptr;
    guarded([&]() -> int {
        const Settings& settings = Settings::own();
        if (!settings.interesting) {
            return fail(
                illegal_state,
                "cannot allocate: the thread is in no interesting region; enter a region first");
        }
        if (bytes < 0 || device < 0) {
            return fail(
                invalid_value,
                "cannot allocate %zd bytes on device %d: a number is negative; pass numbers from 0",
                bytes, device);
        }
        return bytes == 0 ? static_cast<int>(success)
                          : Saver::instance().allocate(&block, static_cast<size_t>(bytes), device,
                                                       settings);
    });
    return block;
}

void tms_torch_free(void* ptr, ssize_t, int, void*) {
    if (ptr == nullptr) {
        return;
    }
    guarded([&]() -> int {
        const auto freed = Saver::instance().free(ptr);
        if (!freed.has_value()) {
            return fail_aloud(invalid_value,
                              "cannot free %p: the address is no block of a region; free each "
                              "block once, at its address",
                              ptr);
        }
        return *freed == success ? *freed
                                 : fail_aloud(*freed,
                                              "cannot free %p: the release failed with cudaError_t "
                                              "%d; resume the region, then repeat the free",
                                              ptr, *freed);
    });
}

int tms_watch_streams(void* const* streams, size_t count) {
    return guarded([&]() -> int {
        if (streams == nullptr && count > 0) {
            return fail(invalid_value,
                        "cannot watch %zu streams: the list is null; pass the streams", count);
        }
        watch_streams(streams, count);
        return success;
    });
}

bool tms_is_capturing(void) {
    bool capturing = false;
    guarded([&] {
        const Runtime* const runtime = Runtime::find();
        capturing = runtime != nullptr && !in_child() && NoneBegins().capturing(*runtime);
        return static_cast<int>(success);
    });
    return capturing;
}

int tms_include_arenas(const char* tag, int device) {
    return guarded([&]() -> int {
        if (tag == nullptr || *tag == '\0' || device < 0) {
            return fail(invalid_value,
                        "cannot include arenas of tag '%s' on device %d: the tag is empty or the "
                        "device negative; name a tag and a device",
                        tag == nullptr ? "" : tag, device);
        }
        return Saver::instance().include_arenas(tag_named(tag), device);
    });
}

int tms_last_error(const char** message) { return take_last(message); }

}  // extern "C"
