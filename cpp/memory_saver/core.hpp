// VmmGraph's functions, of the core that the process has: the program's, libvmmgraph_torch.so's, else the libvmmgraph.so beside this
// library. Looked up and not linked, since a process that is preloaded may load libvmmgraph_torch.so later, and two cores would be two
// page pools.
#pragma once

#include <vmmgraph/vmmgraph.h>

namespace vmmgraph::memory_saver {

#define VMMGRAPH_SAVER_CORE(of)                                                                                              \
    of(device_open) of(device_close) of(device_trim) of(device_pause) of(device_resume) of(region_create) of(region_destroy) \
        of(region_allocate) of(region_free) of(region_resume) of(region_stats) of(region_get_backup) of(last_error) of(last_error_message)

struct Core {
#define VMMGRAPH_SAVER_MEMBER(name) decltype(&::vmmgraph_##name) name;
    VMMGRAPH_SAVER_CORE(VMMGRAPH_SAVER_MEMBER)
#undef VMMGRAPH_SAVER_MEMBER

    // Null if there is none, which is looked for again at the next call. Stays the same once found.
    static const Core* find() noexcept;
    // For what has a handle of it: where there is one, it was found.
    static const Core& found() noexcept;
};

}  // namespace vmmgraph::memory_saver
