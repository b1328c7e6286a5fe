// Independent C++ program: as main.c, and exceptions arrive.
#include <cstdio>
#include <cstring>
#include <string>
#include <vmmgraph/vmmgraph.hpp>

int main() {
    if (vmmgraph::version() != CMAKE_SAYS) {
        return 2;
    }
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::host;
    vmmgraph::SharedVmmAllocator arena(0, options);
    vmmgraph::Space space = arena.open_space();
    void* const block = space.allocate(1 << 20);
    space.seal();
    space.replay(nullptr, [&] { std::memset(block, 3, 1 << 20); });
    try {
        static_cast<void>(space.allocate(1));
        return 3;
    } catch (const vmmgraph::Error& error) {
        std::printf("%s\n", error.what());
        return error.status() == VMMGRAPH_ERROR_WRONG_STATE && static_cast<char*>(block)[5] == 3
                   ? 0
                   : 4;
    }
}
