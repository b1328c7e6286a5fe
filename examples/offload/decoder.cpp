#include "decoder.hpp"

#include <cmath>
#include <stdexcept>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace offload_example {
namespace {

using namespace vmmgraph::engine;

constexpr std::string_view lengths = "lengths";
constexpr std::string_view next_token = "next";
// Tokens of the hot granule before the first step, so that one becomes cold after a few.
constexpr std::int64_t hot_at_first = Shape::granule - 8;

// Everything that was given to the device is done.
void wait(at::Device device) {
    if (device.is_cuda()) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
    }
}

at::Tensor to_unit_scale(const at::Tensor& x) {
    const auto wide = x.to(at::kFloat);
    return (wide * at::rsqrt(wide.pow(2).mean(-1, true) + 1e-5)).to(at::kBFloat16);
}

struct Weights {
    at::Tensor qkv, out, gate, up, down;

    Weights(void* address, const Shape& shape) {
        auto* from = static_cast<char*>(address);
        const auto next = [&](std::int64_t rows, std::int64_t columns) {
            return at::from_blob(std::exchange(from, from + rows * columns * 2), {rows, columns}, shape.numbers());
        };
        qkv = next(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.dimension);
        out = next(shape.heads * shape.dimension, shape.hidden);
        gate = next(shape.hidden, shape.inner);
        up = next(shape.hidden, shape.inner);
        down = next(shape.inner, shape.hidden);
    }
};

ExecutorOptions one_bucket(Ring& ring) {
    ExecutorOptions options;
    options.full = {Key::of(1)};
    options.ring = &ring;
    // Keys and values.
    options.capture.ring_capture.most_runs = 2;
    options.eager_runs = 1;
    options.on_failure = OnFailure::throws;
    return options;
}

}  // namespace

std::uint64_t Shape::weight_bytes() const {
    return static_cast<std::uint64_t>(hidden * ((heads + 2 * kv_heads) * dimension + heads * dimension + 3 * inner)) * 2;
}

Contents::Contents(const vmmgraph::Device& device, const Shape& shape, Streams streams) : device(device), shape(shape), streams(streams) {
    const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, shape.numbers()); };
    const auto layer_of_weights = [&] { return random({static_cast<std::int64_t>(shape.weight_bytes() / 2)}) * (1.0 / 64); };
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
        const bool weights_stream = streams == Streams::weights;
        const auto streamed = weights_stream ? layer_of_weights() : random({2, shape.capacity, shape.kv_heads, shape.dimension});
        auto& buffer = host.emplace_back(device, unit_bytes());
        at::from_blob(buffer.data(), streamed.sizes(), at::kBFloat16).copy_(streamed);
        buffer.changed();
        if (!weights_stream) {
            weights.push_back(layer_of_weights());
        }
    }
    if (streams == Streams::weights) {
        cold = random({shape.layers, 2, shape.capacity, shape.kv_heads, shape.dimension});
    }
    hot = random({shape.layers, 2, Shape::granule, shape.kv_heads, shape.dimension});
    embedding = random({shape.vocabulary, shape.hidden});
    head = random({shape.hidden, shape.vocabulary}) * (1.0 / 64);
    wait(shape.on);
}

std::vector<vmmgraph::RingUnit> Contents::units(bool resident) const {
    return std::vector<vmmgraph::RingUnit>(static_cast<std::size_t>(shape.layers), {unit_bytes(), resident});
}

Decoder::Decoder(Contents& contents, bool resident, const vmmgraph::RingOptions& options)
    : contents_(contents),
      hot_(contents.hot.clone()),
      cold_(contents.cold.defined() ? contents.cold.clone() : at::Tensor()),
      cold_positions_(at::arange(contents.shape.capacity, contents.shape.numbers().dtype(at::kLong))),
      hot_positions_(at::arange(Shape::granule, contents.shape.numbers().dtype(at::kLong))),
      cold_tokens_(contents.shape.context),
      hot_tokens_(hot_at_first),
      ring_(contents.device, contents.units(resident), options),
      inputs_({Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)}), Input::host(lengths, at::kLong, {Extent::fixed(2)}),
               Input::output(names::hidden_states, at::kBFloat16,
                             {Extent::along(Axis::tokens), Extent::fixed(static_cast<std::uint32_t>(contents.shape.hidden))}),
               Input::output(next_token, at::kLong, {Extent::along(Axis::tokens)})},
              {Key::of(1)}, InputsOptions{contents.shape.on}),
      arena_(contents.shape.on.is_cuda() ? std::make_shared<vmmgraph::SharedVmmAllocator>(contents.device) : nullptr) {
    // All of a unit at first, so that every byte of a slot is a number: what is behind the last token counts with a weight of 0.
    for (std::size_t unit = 0; unit < contents.host.size(); ++unit) {
        ring_.set_source(unit, contents.host[unit]);
    }
    executor_ = std::make_unique<GraphExecutor>(arena_, inputs_, [this](Recorder& recorder) { body(recorder); }, one_bucket(ring_));
    // Its eager run and the tensors made above are on two streams.
    wait(contents.shape.on);
    executor_->warm_up();
    wait(contents.shape.on);
    // The warm-up wrote there.
    hot_.copy_(contents.hot);
    set_sources();
    moved_before_ = ring_.stats().copied_bytes;
}

void Decoder::set_sources() {
    if (contents_.streams == Streams::weights) {
        return;
    }
    changed_ = true;
    const auto row = contents_.shape.row_bytes();
    const auto bytes = static_cast<std::uint64_t>(cold_tokens_) * row;
    const auto values = static_cast<std::uint64_t>(contents_.shape.capacity) * row;
    for (std::size_t unit = 0; unit < contents_.host.size(); ++unit) {
        const auto& buffer = contents_.host[unit];
        ring_.set_source(unit, {{buffer, 0, 0, bytes}, {buffer, values, values, bytes}});
    }
}

void Decoder::flush(void* stream) {
    const auto& shape = contents_.shape;
    if (contents_.streams == Streams::weights) {
        cold_.narrow(2, cold_tokens_, Shape::granule).copy_(hot_);
    } else {
        // By the link's other direction, beside whatever the device does next; nobody waits here.
        const auto row = shape.row_bytes();
        for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
            auto& buffer = contents_.host[static_cast<std::size_t>(layer)];
            for (std::int64_t side = 0; side < 2; ++side) {
                const auto from = hot_.select(0, layer).select(0, side);
                const auto at = static_cast<std::uint64_t>(side * shape.capacity + cold_tokens_) * row;
                if (shape.on.is_cuda()) {
                    buffer.store(at, from.const_data_ptr(), from.nbytes(), stream);
                } else {
                    buffer.write(at, from.const_data_ptr(), from.nbytes());
                }
            }
            // The next step writes there.
            buffer.before(stream);
        }
    }
    cold_tokens_ += Shape::granule;
    hot_tokens_ = 0;
    set_sources();
}

Decoder::Output Decoder::step(std::int64_t token) {
    void* const stream = contents_.shape.on.is_cuda() ? c10::cuda::getCurrentCUDAStream().stream() : nullptr;
    if (hot_tokens_ == Shape::granule) {
        flush(stream);
    }
    const std::vector<std::int64_t> tokens{token};
    const std::vector<std::int64_t> now{cold_tokens_, hot_tokens_};
    executor_->run(
        {Key::of(1)}, {{names::tokens, tokens}, {lengths, now}}, [&] { throw std::runtime_error(executor_->last_failure()); }, stream);
    ++hot_tokens_;
    const auto& shape = contents_.shape;
    const auto of_unit =
        contents_.streams == Streams::weights ? shape.weight_bytes() : 2 * static_cast<std::uint64_t>(cold_tokens_) * shape.row_bytes();
    // What the step before copied ahead is out of date where the sources have changed, and so is what stays.
    const auto streamed = ring_.stats().streamed;
    const auto again = streamed > 0 ? contents_.host.size() - streamed + 1 : contents_.host.size();
    planned_ += of_unit * (streamed + (std::exchange(changed_, false) ? again : 0));
    return {inputs_.get(next_token).item<std::int64_t>(), inputs_.hidden_states().clone()};
}

void Decoder::body(Recorder& recorder) {
    const auto now = inputs_.get(lengths);
    const auto position = now.narrow(0, 1, 1);
    const auto masked = at::cat({cold_positions_ >= now.narrow(0, 0, 1), hot_positions_ > position});
    auto x = contents_.embedding.index_select(0, inputs_.tokens());
    for (std::int64_t number = 0; number < contents_.shape.layers; ++number) {
        const auto unit = recorder.streamed(static_cast<std::size_t>(number));
        const bool weights = contents_.streams == Streams::weights;
        x = layer(number, x, weights ? unit.address() : contents_.weights[static_cast<std::size_t>(number)].mutable_data_ptr(),
                  weights ? cold_.select(0, number).mutable_data_ptr() : unit.address(), position, masked);
    }
    x = to_unit_scale(x);
    inputs_.hidden_states().copy_(x);
    inputs_.get(next_token).copy_(at::mm(x, contents_.head).argmax(-1));
}

at::Tensor Decoder::layer(std::int64_t number, const at::Tensor& x, void* weights, void* cold, const at::Tensor& position,
                          const at::Tensor& masked) {
    const auto& shape = contents_.shape;
    const Weights w(weights, shape);
    const auto group = shape.heads / shape.kv_heads;
    const auto qkv = at::mm(to_unit_scale(x), w.qkv);
    const auto part = [&](std::int64_t from, std::int64_t heads) { return qkv.narrow(1, from * shape.dimension, heads * shape.dimension); };
    const auto query = part(0, shape.heads).reshape({shape.kv_heads, group, shape.dimension});
    for (std::int64_t side = 0; side < 2; ++side) {
        const auto made = part(shape.heads + side * shape.kv_heads, shape.kv_heads).reshape({1, shape.kv_heads, shape.dimension});
        hot_.select(0, number).select(0, side).index_copy_(0, position, made);
    }
    const auto all = at::from_blob(cold, {2, shape.capacity, shape.kv_heads, shape.dimension}, shape.numbers());
    const auto by_head = [](const at::Tensor& tokens) { return tokens.transpose(0, 1); };
    const auto keys = by_head(all.select(0, 0)), values = by_head(all.select(0, 1));
    const auto hot_keys = by_head(hot_.select(0, number).select(0, 0)), hot_values = by_head(hot_.select(0, number).select(0, 1));
    const auto scores = at::cat({at::matmul(query, keys.transpose(1, 2)), at::matmul(query, hot_keys.transpose(1, 2))}, -1);
    const auto scaled = (scores.to(at::kFloat) * (1 / std::sqrt(static_cast<double>(shape.dimension)))).masked_fill(masked, -1e30);
    const auto share = at::softmax(scaled, -1).to(at::kBFloat16);
    const auto attended =
        at::matmul(share.narrow(-1, 0, shape.capacity), values) + at::matmul(share.narrow(-1, shape.capacity, Shape::granule), hot_values);
    const auto y = x + at::mm(attended.reshape({1, shape.heads * shape.dimension}), w.out);
    const auto z = to_unit_scale(y);
    return y + at::mm(at::silu(at::mm(z, w.gate)) * at::mm(z, w.up), w.down);
}

}  // namespace offload_example
