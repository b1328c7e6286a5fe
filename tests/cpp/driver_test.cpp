// The installed library on the selected driver, through C++ and the two functions torch loads by
// name. ctest runs the host driver and every platform's stand-in, scripts/gpu.sh a GPU.
// `driver_test cuda` fails on any other driver.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#include <vmmgraph/elastic.hpp>
#include <vmmgraph/region.hpp>
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

const char* name_of(std::int32_t driver) {
    switch (driver) {
        case VMMGRAPH_DRIVER_CUDA:
            return "cuda";
        case VMMGRAPH_DRIVER_HIP:
            return "hip";
        case VMMGRAPH_DRIVER_ASCEND:
            return "ascend";
        case VMMGRAPH_DRIVER_MLU:
            return "mlu";
        default:
            return "host";
    }
}

void others(const vmmgraph::Device& device) {
    vmmgraph::RegionOptions kept;
    kept.policy = vmmgraph::Policy::backup;
    vmmgraph::Region weights(device, "weights", kept);
    void* const weight = weights.allocate(20 * MiB);
    std::vector<unsigned char> contents[2];
    for (auto& found : contents) {
        weights.pause();
        expect(weights.stats().resident_bytes == 0, "a paused region has memory");
        found.resize(20 * MiB);
        weights.get_backup(weight, 0, found.data(), found.size());
        weights.resume();
        expect(weights.stats().resident_bytes >= 20 * MiB, "a resumed region has none");
    }
    expect(contents[0] == contents[1], "contents that came back are others");
    weights.free(weight);
    vmmgraph::ElasticOptions options;
    options.page_bytes = 4 * MiB;
    vmmgraph::ElasticBuffer buffer(device, 64 * MiB, options);
    buffer.commit(0, 8 * MiB);
    buffer.commit(8 * MiB, 24 * MiB);
    expect(buffer.stats().committed_bytes == 32 * MiB, "what was committed");
    buffer.decommit(16 * MiB, 16 * MiB);
    expect(buffer.stats().committed_bytes == 16 * MiB, "what is left of it");
}

}  // namespace

int main(int argc, char** argv) {
    const std::string wanted = argc > 1 ? argv[1] : "host";
    vmmgraph::Device device = vmmgraph::Device::open();
    const auto info = device.info();
    const std::string found = name_of(info.driver);
    std::printf("%s driver: %s\n", found.c_str(), info.name);
    expect(found == wanted, "another driver than the one wanted");
    // Otherwise outputs must be marked as kept.
    const bool exchanges = info.driver != VMMGRAPH_DRIVER_HIP && info.driver != VMMGRAPH_DRIVER_MLU;
    {
        vmmgraph::SharedVmmAllocator arena(device);
        std::vector<vmmgraph::Space> shapes;
        int launched = 0;
        for (std::size_t batch : {1, 16, 64}) {
            auto space = arena.open_space();
            void* const activation = space.allocate(batch * MiB);
            static_cast<void>(exchanges ? space.allocate(4096) : space.allocate_kept(4096));
            space.free(activation);
            const auto report = space.seal();
            expect(
                report.retained_blocks == 1 && report.retained_bytes == (exchanges ? 2 * MiB : 0),
                "one retained block");
            shapes.push_back(std::move(space));
        }
        for (auto& space : shapes) {
            space.replay(nullptr, [&launched] { ++launched; });
        }
        expect(launched == 3, "a replay did not launch");
        const auto of_outputs = exchanges ? 3 * 2 * MiB : 2 * MiB;
        expect(arena.mapped_size() == 64 * MiB + of_outputs,
               "the hungriest shape, and a page for each output, or for all that are kept");
        try {
            static_cast<void>(arena.allocate(info.total_bytes));
            expect(false, "a block as large as the device was allocated twice over");
        } catch (const vmmgraph::OutOfMemory& error) {
            std::printf("as it should: %s\n", error.what());
        }
        expect(vmmgraph_torch_set_arena(0, arena.handle()) == VMMGRAPH_OK, "set_arena");
        const auto blocks = arena.stats().blocks;
        void* const segment =
            vmmgraph_torch_alloc(static_cast<std::ptrdiff_t>(20 * MiB), 0, nullptr);
        expect(segment != nullptr && arena.current_offset() == 20 * MiB, "torch_alloc");
        vmmgraph_torch_free(segment, static_cast<std::ptrdiff_t>(20 * MiB), 0, nullptr);
        expect(arena.current_offset() == 20 * MiB && arena.stats().blocks == blocks, "torch_free");
        expect(vmmgraph_torch_set_arena(0, nullptr) == VMMGRAPH_OK, "reset of the arena");
    }
    others(device);
    // Frees memory deferred by a capture.
    static_cast<void>(device.trim());
    const auto stats = device.stats();
    expect(stats.physical_bytes == 0 && stats.mappings == 0 && stats.reservations == 0,
           "something was not given back");
    std::printf("%s\n", failures == 0 ? "passed" : "failed");
    return failures == 0 ? 0 : 1;
}
