// Functions of the process's VmmGraph core: the program's, else libvmmgraph_torch.so's, else
// libvmmgraph.so in this library's folder or in ../_lib (the copies in a wheel). Looked up, not
// linked: a preloaded process may load
// libvmmgraph_torch.so later, and two cores would be two page pools.
#pragma once

#include <vmmgraph/vmmgraph.h>

namespace vmmgraph::memory_saver {

#define VMMGRAPH_SAVER_CORE(of)                                                                    \
    of(device_open) of(device_close) of(device_trim) of(device_trim_host) of(device_pause)         \
        of(device_resume) of(region_create) of(region_destroy) of(region_allocate) of(region_free) \
            of(region_resume) of(region_stats) of(region_get_backup) of(last_error)                \
                of(last_error_message)

struct Core {
#define VMMGRAPH_SAVER_MEMBER(name) decltype(&::vmmgraph_##name) name;
    VMMGRAPH_SAVER_CORE(VMMGRAPH_SAVER_MEMBER)
#undef VMMGRAPH_SAVER_MEMBER

    // Returns null if no core is loaded; the next call searches again.
    static const Core* find() noexcept;
    static const Core& found() noexcept;
};

}  // namespace vmmgraph::memory_saver
