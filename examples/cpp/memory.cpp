// Weights, graphs and a KV cache on one device: the cache makes room for a capture, then all sleep.
#include <cstdio>
#include <cstring>
#include <vmmgraph/elastic.hpp>
#include <vmmgraph/region.hpp>

int main() {
    vmmgraph::DeviceOptions options;
    options.driver = vmmgraph::DriverChoice::host;  // on a GPU: vmmgraph::DriverChoice::cuda
    options.budget_bytes = 128 << 20;
    const auto device = vmmgraph::Device::open(options);
    void* const stream = nullptr;  // on a GPU: the cudaStream_t of the steps

    vmmgraph::Region weights(device, "weights", {vmmgraph::Policy::backup});
    auto* const weight = static_cast<char*>(weights.allocate(16 << 20, stream));
    std::memset(weight, 7, 16 << 20);

    vmmgraph::KvOptions shape;
    shape.planes.assign(4, 64 << 10);  // keys and values of two layers: 64 KiB a block in each
    shape.blocks_most = 10'000;        // addresses for these; memory by grow_to()
    shape.memory.page_bytes = 2 << 20;
    vmmgraph::KvCache cache(device, shape);
    cache.grow_to(384);
    // Called by the capture below, which is short of memory.
    const vmmgraph::Reclaimer reclaimer(
        device,
        [&](std::uint64_t) {
            const auto before = cache.memory().committed_bytes;
            cache.shrink_to(128, {}, {{stream}});  // unmapped after the stream's work
            return before - cache.memory().committed_bytes;
        },
        10);

    vmmgraph::ArenaOptions tagged;
    tagged.tag = "graphs";
    vmmgraph::SharedVmmAllocator arena(device, tagged);
    vmmgraph::Space graph = arena.open_space();
    void* const hidden = graph.allocate(48 << 20, stream);
    auto* const output = static_cast<char*>(graph.allocate_kept(4096, stream));
    graph.free(hidden);
    graph.seal();
    std::printf("captured: %d blocks left\n", static_cast<int>(cache.stats().backed_blocks));

    cache.shrink_to(0, {}, {{stream}});  // a cache has no tag
    vmmgraph::pause(device, {"weights", "graphs"}, {{stream}});
    std::printf("asleep: %d bytes\n", static_cast<int>(device.stats().physical_bytes));
    vmmgraph::resume(device, {"weights", "graphs"}, std::chrono::seconds(5));
    graph.replay(stream, [&] { output[0] = weight[0]; });  // on a GPU: cudaGraphLaunch
    std::printf("awake: output %d\n", output[0]);
}
