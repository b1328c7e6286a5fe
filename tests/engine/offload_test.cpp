// The example's decoder whose keys and values or weights stream, beside the one that has all of it.
#include "../../examples/offload/decoder.hpp"

#include <cstring>

#include "devices.hpp"

namespace engine_tests {
namespace {

using offload_example::Contents;
using offload_example::Decoder;
using offload_example::Shape;
using offload_example::Streams;

Shape small() {
    Shape shape;
    shape.layers = 7;
    shape.hidden = 64;
    shape.heads = 4;
    shape.kv_heads = 2;
    shape.dimension = 16;
    shape.inner = 96;
    shape.vocabulary = 50;
    shape.context = 2 * Shape::granule;
    shape.capacity = 5 * Shape::granule;
    shape.on = device();
    return shape;
}

// How many of so many steps differ.
int differing(Contents& contents, int steps, const std::function<void()>& between = [] {}) {
    const auto current = std::make_unique<OnStream>();
    std::vector<Decoder::Output> wanted;
    {
        Decoder resident(contents, true, {});
        for (int step = 0; step < steps; ++step) {
            wanted.push_back(resident.step(wanted.empty() ? 1 : wanted.back().token));
        }
    }
    between();
    Decoder streamed(contents, false, {});
    int wrong = 0;
    for (int step = 0; step < steps; ++step) {
        const auto& right = wanted[static_cast<std::size_t>(step)];
        const auto found = streamed.step(step == 0 ? 1 : wanted[static_cast<std::size_t>(step) - 1].token);
        wrong += found.token != right.token || !at::equal(found.hidden, right.hidden);
    }
    if (has_gpu()) {
        EXPECT_EQ(streamed.moved_bytes(), streamed.planned_bytes());
        EXPECT_EQ(streamed.graph_steps(), static_cast<std::uint64_t>(steps));
        EXPECT_EQ(streamed.inputs_by_kernel(), static_cast<std::uint64_t>(steps) + 1) << "the warm-up's too";
    } else {
        EXPECT_GE(streamed.moved_bytes(), streamed.planned_bytes() / 2);
    }
    return wrong;
}

TEST(Offload, StreamedDecodesBitForBitAsResident) {
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    const auto of = vmmgraph::Device::open();
    for (const auto streams : {Streams::keys_and_values, Streams::weights}) {
        at::manual_seed(3);
        Contents contents(of, small(), streams);
        // Two granules become cold on the way.
        EXPECT_EQ(differing(contents, most_steps(140)), 0);
    }
}

// The control: a number of one layer is another one, and it shows.
TEST(Offload, AnotherByteInALayersSourceIsAnotherResult) {
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    const auto of = vmmgraph::Device::open();
    for (const auto streams : {Streams::keys_and_values, Streams::weights}) {
        at::manual_seed(3);
        Contents contents(of, small(), streams);
        const auto other = [&] {
            // Of the values, where keys and values stream.
            const auto at = streams == Streams::weights ? 0 : contents.unit_bytes() / 2;
            const at::BFloat16 large = 100;
            contents.host[4].write(at, &large, sizeof large);
        };
        EXPECT_GT(differing(contents, 3, other), 0);
    }
}

}  // namespace
}  // namespace engine_tests
