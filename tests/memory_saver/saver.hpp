// The memory saver's functions, looked up at run time, because no test links the library.
#pragma once

#include <dlfcn.h>
#include <vmmgraph/memory_saver.h>

#include <cstddef>
#include <cstring>

#include "fake_cudart.h"

namespace saver {

constexpr std::size_t MiB = std::size_t{1} << 20;

#define SAVER_NAMES(of)                                                                       \
    of(tms_set_interesting_region) of(tms_get_interesting_region) of(tms_set_current_tag)     \
        of(tms_get_current_tag) of(tms_set_enable_cpu_backup) of(tms_get_enable_cpu_backup)   \
            of(tms_set_cpu_backup_backend) of(tms_get_cpu_backup_backend)                     \
                of(tms_set_enable_disk_backup) of(tms_get_enable_disk_backup)                 \
                    of(tms_set_disk_backup_dir) of(tms_pause) of(tms_resume)                  \
                        of(tms_get_cpu_backup_pointer) of(tms_set_retain_cpu_backup)          \
                            of(tms_get_retain_cpu_backup) of(set_memory_margin_bytes)         \
                                of(tms_torch_malloc) of(tms_torch_free) of(tms_watch_streams) \
                                    of(tms_is_capturing) of(tms_include_arenas) of(tms_last_error)

struct Functions {
#define SAVER_MEMBER(name) decltype(&::name) name = nullptr;
    SAVER_NAMES(SAVER_MEMBER)
#undef SAVER_MEMBER

    // `library`: a dlopen handle or RTLD_DEFAULT. Returns whether all names exist.
    bool look_up(void* library) {
        bool all = true;
#define SAVER_LOOK_UP(name)                                         \
    name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
    all = all && name != nullptr;
        SAVER_NAMES(SAVER_LOOK_UP)
#undef SAVER_LOOK_UP
        return all;
    }
};

inline void fill(void* block, std::size_t bytes, int value) { std::memset(block, value, bytes); }

inline bool holds(const void* block, std::size_t bytes, int value) {
    const auto* at = static_cast<const unsigned char*>(block);
    for (std::size_t i = 0; i < bytes; ++i) {
        if (at[i] != static_cast<unsigned char>(value)) {
            return false;
        }
    }
    return true;
}

}  // namespace saver
