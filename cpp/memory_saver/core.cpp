#include "core.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

namespace vmmgraph::memory_saver {

namespace {

std::atomic<const Core*> the_core{nullptr};

bool load(void* where, Core& core) {
    const auto version =
        reinterpret_cast<decltype(&::vmmgraph_abi_version)>(dlsym(where, "vmmgraph_abi_version"));
    if (version == nullptr || version() != VMMGRAPH_ABI_VERSION) {
        return false;
    }
    bool all = true;
#define VMMGRAPH_SAVER_LOOK_UP(name)                                                             \
    core.name = reinterpret_cast<decltype(&::vmmgraph_##name)>(dlsym(where, "vmmgraph_" #name)); \
    all = all && core.name != nullptr;
    VMMGRAPH_SAVER_CORE(VMMGRAPH_SAVER_LOOK_UP)
#undef VMMGRAPH_SAVER_LOOK_UP
    return all;
}

// libvmmgraph_torch.so has priority, since the program's arenas belong to this core.
int note_core(dl_phdr_info* info, std::size_t, void* into) {
    const char* const slash = std::strrchr(info->dlpi_name, '/');
    const char* const name = slash == nullptr ? info->dlpi_name : slash + 1;
    const bool torch = std::strncmp(name, "libvmmgraph_torch.so", 20) == 0;
    if (torch || std::strncmp(name, "libvmmgraph.so", 14) == 0) {
        try {
            auto& paths = *static_cast<std::vector<std::string>*>(into);
            paths.insert(torch ? paths.begin() : paths.end(), info->dlpi_name);
        } catch (...) {
            return 1;
        }
    }
    return 0;
}

bool load_any(Core& core) {
    if (load(RTLD_DEFAULT, core)) {
        return true;
    }
    std::vector<std::string> loaded;
    dl_iterate_phdr(note_core, &loaded);
    for (const std::string& path : loaded) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
        if (library != nullptr && load(library, core)) {
            return true;
        }
    }
    Dl_info here{};
    std::string folder;
    if (dladdr(&the_core, &here) != 0 && here.dli_fname != nullptr) {
        const char* const slash = std::strrchr(here.dli_fname, '/');
        folder.assign(here.dli_fname,
                      slash == nullptr ? 0 : static_cast<std::size_t>(slash - here.dli_fname + 1));
    }
    const std::string file = VMMGRAPH_CORE_FILE;
    // The wheel has copies of this library under torch_memory_saver's names, in _shims beside _lib.
    for (const std::string& path : {folder + file, folder + "../_lib/" + file, file}) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library != nullptr && load(library, core)) {
            return true;
        }
    }
    return false;
}

}  // namespace

const Core* Core::find() noexcept {
    if (const Core* const core = the_core.load(std::memory_order_acquire); core != nullptr) {
        return core;
    }
    try {
        auto* const core = new Core{};
        const Core* expected = nullptr;
        if (!load_any(*core)) {
            delete core;
            return nullptr;
        }
        if (!the_core.compare_exchange_strong(expected, core, std::memory_order_acq_rel)) {
            delete core;
            return expected;
        }
        return core;
    } catch (...) {
        return nullptr;
    }
}

const Core& Core::found() noexcept { return *the_core.load(std::memory_order_acquire); }

}  // namespace vmmgraph::memory_saver
