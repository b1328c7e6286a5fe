// Runs with other_library.c preloaded before the real library: the first constructor must report
// the mismatch.
#include <cstdio>
#include <cstring>
#include <vmmgraph/vmmgraph.hpp>

template <class F>
static bool refuses(F&& construct) {
    try {
        construct();
    } catch (const vmmgraph::Error& error) {
        std::puts(error.what());
        return error.info().requested == VMMGRAPH_ABI_VERSION && error.info().available == 12345 &&
               std::strstr(error.what(), "12345") != nullptr &&
               std::strstr(error.what(), "99.0.1") != nullptr;
    }
    return false;
}

int main() {
    const bool device = refuses([] { static_cast<void>(vmmgraph::Device::open()); });
    const bool allocator = refuses([] { vmmgraph::SharedVmmAllocator arena; });
    return device && allocator ? 0 : 1;
}
