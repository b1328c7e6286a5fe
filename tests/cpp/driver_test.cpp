// The installed library on the driver at hand, through C++ and the two functions torch loads by name. ctest runs it on the host driver,
// scripts/gpu.sh on a GPU: `driver_test cuda` fails unless that is the driver.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#include <vmmgraph/vmmgraph.hpp>

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
int failures = 0;

void expect(bool holds, const char* what) {
    if (!holds) {
        std::printf("FAILED: %s\n", what);
        ++failures;
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string wanted = argc > 1 ? argv[1] : "host";
    const vmmgraph::Device device = vmmgraph::Device::open();
    const auto info = device.info();
    const std::string found = info.driver == VMMGRAPH_DRIVER_CUDA ? "cuda" : info.driver == VMMGRAPH_DRIVER_HIP ? "hip" : "host";
    std::printf("%s driver: %s\n", found.c_str(), info.name);
    expect(found == wanted, "another driver than the one wanted");
    {
        vmmgraph::SharedVmmAllocator arena(device);
        std::vector<vmmgraph::Space> shapes;
        int launched = 0;
        for (std::size_t batch : {1, 16, 64}) {
            auto space = arena.open_space();
            void* const activation = space.allocate(batch * MiB);
            static_cast<void>(space.allocate(4096));
            space.free(activation);
            const auto report = space.seal();
            expect(report.retained_blocks == 1 && report.retained_bytes == 2 * MiB, "one retained block on a page of its own");
            shapes.push_back(std::move(space));
        }
        for (auto& space : shapes) {
            space.replay(nullptr, [&launched] { ++launched; });
        }
        expect(launched == 3, "a replay did not launch");
        expect(arena.mapped_size() == 64 * MiB + 3 * 2 * MiB, "the hungriest shape, and a page for each output");
        try {
            static_cast<void>(arena.allocate(info.total_bytes));
            expect(false, "a block as large as the device was allocated twice over");
        } catch (const vmmgraph::OutOfMemory& error) {
            std::printf("as it should: %s\n", error.what());
        }
        expect(vmmgraph_torch_set_arena(0, arena.handle()) == VMMGRAPH_OK, "set_arena");
        const auto blocks = arena.stats().blocks;
        void* const segment = vmmgraph_torch_alloc(static_cast<std::ptrdiff_t>(20 * MiB), 0, nullptr);
        expect(segment != nullptr && arena.current_offset() == 20 * MiB, "torch_alloc");
        vmmgraph_torch_free(segment, static_cast<std::ptrdiff_t>(20 * MiB), 0, nullptr);
        expect(arena.current_offset() == 20 * MiB && arena.stats().blocks == blocks, "torch_free");
        expect(vmmgraph_torch_set_arena(0, nullptr) == VMMGRAPH_OK, "reset of the arena");
    }
    const auto stats = device.stats();
    expect(stats.physical_bytes == 0 && stats.mappings == 0 && stats.reservations == 0, "something was not given back");
    std::printf("%s\n", failures == 0 ? "passed" : "failed");
    return failures == 0 ? 0 : 1;
}
