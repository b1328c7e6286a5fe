// The example's decoder with streamed keys and values or weights, compared with a resident one.
#include "../../examples/offload/decoder.hpp"

#include <stdexcept>

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
        const auto found =
            streamed.step(step == 0 ? 1 : wanted[static_cast<std::size_t>(step) - 1].token);
        wrong += found.token != right.token || !at::equal(found.hidden, right.hidden);
    }
    if (has_gpu()) {
        EXPECT_EQ(streamed.moved_bytes(), streamed.planned_bytes());
        EXPECT_EQ(streamed.graph_steps(), static_cast<std::uint64_t>(steps));
        EXPECT_EQ(streamed.inputs_by_kernel(), static_cast<std::uint64_t>(steps) + 1)
            << "the warm-up's too";
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
        EXPECT_EQ(differing(contents, most_steps(140)), 0);
    }
}

// A decoder must find only its own.
void forget(Contents& contents) {
    for (auto& buffer : contents.host) {
        const auto numbers =
            at::randn({static_cast<std::int64_t>(buffer.bytes() / 2)}).to(at::kBFloat16);
        buffer.write(0, numbers.const_data_ptr(), buffer.bytes());
    }
}

struct Answer {
    std::vector<Decoder::Output> made;
    std::uint64_t moved = 0, planned = 0;
};

Answer answer(Contents& contents, bool resident, const std::vector<std::int64_t>& prompt,
              std::int64_t chunk, int steps) {
    const OnStream current;
    if (contents.streams == Streams::keys_and_values) {
        forget(contents);
    }
    Decoder decoder(contents, resident, {});
    Answer answer;
    answer.made.push_back(decoder.prefill(prompt, chunk));
    answer.moved = decoder.moved_bytes();
    answer.planned = decoder.planned_bytes();
    for (int step = 0; step < steps; ++step) {
        answer.made.push_back(decoder.step(answer.made.back().token));
    }
    if (has_gpu() && !resident) {
        EXPECT_EQ(decoder.moved_bytes(), decoder.planned_bytes());
    }
    return answer;
}

// Bit-equal for any chunk size, and close to single tokens.
TEST(Offload, APromptInChunksIsThatOfAllResident) {
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    const auto of = vmmgraph::Device::open();
    const auto shape = small();
    std::vector<std::int64_t> prompt;
    for (std::int64_t token = 0; token < 3 * Shape::granule + 37; ++token) {
        prompt.push_back(token * token % shape.vocabulary);
    }
    for (const auto streams : {Streams::keys_and_values, Streams::weights}) {
        at::manual_seed(3);
        Contents contents(of, shape, streams);
        at::Tensor one_by_one;
        {
            const OnStream current;
            Decoder decoder(contents, false, {});
            static_cast<void>(decoder.prefill({prompt[0]}, Shape::granule));
            for (std::size_t at = 1; at < prompt.size(); ++at) {
                one_by_one = decoder.step(prompt[at]).hidden;
            }
        }
        for (const std::int64_t granules : {1, 2, 5}) {
            const auto wanted = answer(contents, true, prompt, granules * Shape::granule, 100);
            const auto found = answer(contents, false, prompt, granules * Shape::granule, 100);
            int wrong = 0;
            for (std::size_t step = 0; step < wanted.made.size(); ++step) {
                wrong += found.made[step].token != wanted.made[step].token ||
                         !at::equal(found.made[step].hidden, wanted.made[step].hidden);
            }
            EXPECT_EQ(wrong, 0) << granules;
            EXPECT_EQ(found.moved, found.planned) << granules;
            EXPECT_GT(found.moved, 0U);
            // Other kernels round differently.
            const auto off = (found.made[0].hidden.to(at::kFloat) - one_by_one.to(at::kFloat))
                                 .norm()
                                 .item<double>();
            EXPECT_LT(off, 0.05 * one_by_one.to(at::kFloat).norm().item<double>()) << granules;
        }
    }
}

TEST(Offload, APromptThatDoesNotFitIsRefusedAndTheNextOneIsRight) {
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    const auto of = vmmgraph::Device::open();
    const auto shape = small();
    at::manual_seed(3);
    Contents contents(of, shape, Streams::keys_and_values);
    const OnStream current;
    Decoder decoder(contents, false, {});
    const std::vector<std::int64_t> prompt(Shape::granule + 3, 7);
    const auto wanted = decoder.prefill(prompt, Shape::granule);
    EXPECT_THROW(decoder.prefill({}, Shape::granule), std::invalid_argument);
    EXPECT_THROW(decoder.prefill(prompt, Shape::granule - 1), std::invalid_argument);
    EXPECT_THROW(
        decoder.prefill(std::vector<std::int64_t>(static_cast<std::size_t>(shape.capacity) + 1),
                        Shape::granule),
        std::invalid_argument);
    // Ends the prompt midway.
    auto broken = std::vector<std::int64_t>(2 * Shape::granule, 7);
    broken.back() = shape.vocabulary;
    if (!has_gpu()) {
        // On a GPU the assertion would destroy the context.
        EXPECT_ANY_THROW(decoder.prefill(broken, Shape::granule));
    }
    const auto found = decoder.prefill(prompt, Shape::granule);
    EXPECT_EQ(found.token, wanted.token);
    EXPECT_TRUE(at::equal(found.hidden, wanted.hidden));
}

// Control.
TEST(Offload, AnotherByteInALayersSourceIsAnotherResult) {
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    const auto of = vmmgraph::Device::open();
    for (const auto streams : {Streams::keys_and_values, Streams::weights}) {
        at::manual_seed(3);
        Contents contents(of, small(), streams);
        const auto other = [&] {
            const auto at = streams == Streams::weights ? 0 : contents.unit_bytes() / 2;
            const at::BFloat16 large = 100;
            contents.host[4].write(at, &large, sizeof large);
        };
        EXPECT_GT(differing(contents, 3, other), 0);
    }
}

}  // namespace
}  // namespace engine_tests
