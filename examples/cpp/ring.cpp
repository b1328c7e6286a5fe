#include <cstdio>
#include <cstring>
#include <vector>
#include <vmmgraph/ring.hpp>

int main() {
    constexpr std::uint64_t layer_bytes = 8 << 20;
    const std::vector<vmmgraph::RingUnit> layers(12, {layer_bytes});
    vmmgraph::RingDemand demand;
    demand.units = layers;
    demand.link_gib_per_second = 50;  // measured on this machine
    demand.compute_seconds = 1e-3;    // of a step with everything resident
    std::printf("%s", vmmgraph::ring_ceiling_text(demand).c_str());

    vmmgraph::DeviceOptions options;
    options.driver = vmmgraph::DriverChoice::host;  // host addresses; each call completes its work
    const vmmgraph::Device device = vmmgraph::Device::open(options);
    void* const stream = nullptr;

    vmmgraph::Ring ring(device, layers);
    std::vector<vmmgraph::HostBuffer> weights;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        weights.emplace_back(device, layer_bytes);  // pinned
        std::memset(weights[layer].data(), static_cast<int>(layer), layer_bytes);
        weights[layer].changed();
        ring.set_source(layer, weights[layer]);
    }
    ring.prime();  // the first step waits for nothing
    unsigned sum = 0;
    for (int step = 0; step < 2; ++step) {
        for (std::size_t layer = 0; layer < layers.size(); ++layer) {
            const vmmgraph::UnitScope unit(ring, layer, stream);        // after its copy
            sum += *static_cast<const unsigned char*>(unit.address());  // with CUDA: kernels
        }  // a later layer uses the slot after these kernels
    }
    const auto stats = ring.stats();
    std::printf("sum %u, %llu copies, %llu MiB on the device instead of %llu\n", sum,
                static_cast<unsigned long long>(stats.copies),
                static_cast<unsigned long long>(stats.device_bytes >> 20),
                static_cast<unsigned long long>(layers.size() * layer_bytes >> 20));
}
