// Three batch shapes on one set of pages. Runs on any machine: the host driver replaces the GPU.
#include <cstdio>
#include <cstring>
#include <vector>
#include <vmmgraph/vmmgraph.hpp>

int main() {
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::host;
    vmmgraph::SharedVmmAllocator arena(0, options);
    void* const stream = nullptr;

    std::vector<vmmgraph::Space> shapes;
    std::vector<void*> outputs;
    std::size_t sum = 0;
    for (std::size_t batch : {1, 8, 64}) {
        vmmgraph::Space space = arena.open_space();  // with CUDA, the capture begins here
        void* hidden = space.allocate(batch << 20, stream);
        void* scores = space.allocate(batch << 20, stream);
        void* output = space.allocate(4096, stream);
        space.free(hidden);
        space.free(scores);
        sum += space.seal().peak_live_bytes;  // and ends here; the output is retained
        shapes.push_back(std::move(space));
        outputs.push_back(output);
    }
    for (std::size_t i : {2, 0, 1}) {  // with CUDA: cudaGraphLaunch(graphs[i], stream)
        shapes[i].replay(stream, [&] { std::memset(outputs[i], static_cast<int>(i + 1), 4096); });
    }
    std::printf("physical %zu MiB instead of %zu MiB\n", arena.mapped_size() >> 20, sum >> 20);
}
