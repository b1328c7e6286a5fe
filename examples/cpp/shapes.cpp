// Captures four decode shapes within a memory limit, replays one and writes the page map.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vmmgraph/vmmgraph.hpp>

struct Captured {
    vmmgraph::Space space;
    void* output;
};

int main() {
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::host;  // on a GPU: vmmgraph::DriverChoice::cuda
    options.budget_bytes = 40 << 20;
    vmmgraph::SharedVmmAllocator arena(0, options);
    void* const stream = nullptr;  // on a GPU: the cudaStream_t of the captures

    std::map<std::size_t, Captured> graphs;
    for (const std::size_t batch : {8, 16, 32, 64}) {
        try {
            vmmgraph::Space space = arena.open_space();
            space.set_label("decode " + std::to_string(batch));
            // On a GPU: cudaStreamBeginCapture, then kernels over the addresses of these blocks.
            void* const hidden = space.allocate(batch << 20, stream);
            void* const output = space.allocate_kept(batch << 10, stream);  // read after the replay
            space.free(hidden);
            // On a GPU: cudaStreamEndCapture.
            space.seal();
            graphs.emplace(batch, Captured{std::move(space), output});
        } catch (const vmmgraph::OutOfMemory& error) {
            // On a GPU: cudaStreamEndCapture too, and destroy its graph.
            std::printf("decode %zu runs without a graph: %s\n", batch, error.what());
        }
    }

    Captured& graph = graphs.lower_bound(13)->second;  // 13 sequences run in the graph of 16
    graph.space.replay(stream, [&] {
        std::memset(graph.output, 7, 16 << 10);  // on a GPU: cudaGraphLaunch
    });
    std::printf("%s: output %d, %zu graphs in %zu MiB\n", graph.space.label().c_str(),
                *static_cast<const char*>(graph.output), graphs.size(), arena.mapped_size() >> 20);
    arena.save_map("graphs.html");
}
