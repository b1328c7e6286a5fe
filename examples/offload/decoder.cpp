#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace offload_example {
namespace {

using namespace vmmgraph::engine;

constexpr std::string_view lengths = "lengths";
constexpr std::string_view next_token = "next";
// Initial tokens of the hot granule, so that it becomes cold after a few steps.
constexpr std::int64_t hot_at_first = Shape::granule - 8;

// Waits for all work of the device.
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
            return at::from_blob(std::exchange(from, from + rows * columns * 2), {rows, columns},
                                 shape.numbers());
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
    options.capture.ring_capture.most_runs = 2;
    options.eager_runs = 1;
    options.on_failure = OnFailure::throws;
    return options;
}

}  // namespace

std::uint64_t Shape::weight_bytes() const {
    return static_cast<std::uint64_t>(
               hidden * ((heads + 2 * kv_heads) * dimension + heads * dimension + 3 * inner)) *
           2;
}

Contents::Contents(const vmmgraph::Device& device, const Shape& shape, Streams streams)
    : device(device), shape(shape), streams(streams) {
    const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, shape.numbers()); };
    const auto layer_of_weights = [&] {
        return random({static_cast<std::int64_t>(shape.weight_bytes() / 2)}) * (1.0 / 64);
    };
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
        const bool weights_stream = streams == Streams::weights;
        const auto streamed = weights_stream
                                  ? layer_of_weights()
                                  : random({2, shape.capacity, shape.kv_heads, shape.dimension});
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
    return std::vector<vmmgraph::RingUnit>(static_cast<std::size_t>(shape.layers),
                                           {unit_bytes(), resident});
}

Decoder::Decoder(Contents& contents, bool resident, const vmmgraph::RingOptions& options)
    : contents_(contents),
      hot_(contents.hot.clone()),
      cold_(contents.cold.defined() ? contents.cold.clone() : at::Tensor()),
      cold_positions_(
          at::arange(contents.shape.capacity, contents.shape.numbers().dtype(at::kLong))),
      hot_positions_(at::arange(Shape::granule, contents.shape.numbers().dtype(at::kLong))),
      cold_tokens_(contents.shape.context),
      hot_tokens_(hot_at_first),
      ring_(contents.device, contents.units(resident), options),
      inputs_({Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)}),
               Input::host(lengths, at::kLong, {Extent::fixed(2)}),
               Input::output(names::hidden_states, at::kBFloat16,
                             {Extent::along(Axis::tokens),
                              Extent::fixed(static_cast<std::uint32_t>(contents.shape.hidden))}),
               Input::output(next_token, at::kLong, {Extent::along(Axis::tokens)})},
              {Key::of(1)}, InputsOptions{contents.shape.on}),
      arena_(contents.shape.on.is_cuda()
                 ? std::make_shared<vmmgraph::SharedVmmAllocator>(contents.device)
                 : nullptr) {
    // Initially whole units, so that all bytes are valid numbers: positions after the last token
    // are multiplied by 0.
    for (std::size_t unit = 0; unit < contents.host.size(); ++unit) {
        ring_.set_source(unit, contents.host[unit]);
    }
    executor_ = std::make_unique<GraphExecutor>(
        arena_, inputs_, [this](Recorder& recorder) { body(recorder); }, one_bucket(ring_));
    wait(contents.shape.on);
    executor_->warm_up();
    wait(contents.shape.on);
    hot_.copy_(contents.hot);
    set_sources();
    moved_before_ = ring_.stats().copied_bytes;
}

void Decoder::set_sources() {
    if (contents_.streams == Streams::weights) {
        return;
    }
    // Units copied ahead in the previous step, and resident units, are outdated.
    again_ = contents_.host.size() - streamed() + (streamed() > 0 ? 1 : 0);
    for (std::size_t unit = 0; unit < contents_.host.size(); ++unit) {
        set_source(unit, cold_tokens_);
    }
}

void Decoder::set_source(std::size_t unit, std::int64_t cold_tokens) {
    const auto row = contents_.shape.row_bytes();
    const auto bytes = static_cast<std::uint64_t>(cold_tokens) * row;
    const auto values = static_cast<std::uint64_t>(contents_.shape.capacity) * row;
    const auto& buffer = contents_.host[unit];
    ring_.set_source(unit, {{buffer, 0, 0, bytes}, {buffer, values, values, bytes}});
}

void Decoder::store(std::int64_t number, std::int64_t side, const at::Tensor& from, void* stream) {
    const auto& shape = contents_.shape;
    if (contents_.streams == Streams::weights) {
        cold_.select(0, number).select(0, side).narrow(0, cold_tokens_, from.size(0)).copy_(from);
        return;
    }
    auto& buffer = contents_.host[static_cast<std::size_t>(number)];
    const auto at =
        static_cast<std::uint64_t>(side * shape.capacity + cold_tokens_) * shape.row_bytes();
    if (shape.on.is_cuda()) {
        // Uses the link's second direction, in parallel with later work of the device. Does not
        // wait.
        buffer.store(at, from.const_data_ptr(), from.nbytes(), stream);
    } else {
        buffer.write(at, from.const_data_ptr(), from.nbytes());
    }
}

void Decoder::flush(void* stream) {
    for (std::int64_t layer = 0; layer < contents_.shape.layers; ++layer) {
        for (std::int64_t side = 0; side < 2; ++side) {
            store(layer, side, hot_.select(0, layer).select(0, side), stream);
        }
        contents_.host[static_cast<std::size_t>(layer)].before(stream);
    }
    cold_tokens_ += Shape::granule;
    hot_tokens_ = 0;
    set_sources();
}

Decoder::Output Decoder::prefill(const std::vector<std::int64_t>& prompt, std::int64_t chunk) {
    const auto& shape = contents_.shape;
    const auto length = static_cast<std::int64_t>(prompt.size());
    if (length == 0 || length > shape.capacity || chunk <= 0 || chunk % Shape::granule != 0) {
        throw std::invalid_argument("a prompt is of 1 to " + std::to_string(shape.capacity) +
                                    " tokens, its chunks are whole granules");
    }
    void* const stream = shape.on.is_cuda() ? c10::cuda::getCurrentCUDAStream().stream() : nullptr;
    cold_tokens_ = hot_tokens_ = 0;
    set_sources();
    for (auto* const buffer : leaving_to_) {
        if (buffer != nullptr) {
            buffer->before(stream);
        }
    }
    if (contents_.streams == Streams::keys_and_values) {
        leaving_ = at::empty({2, 2, std::min(chunk, length), shape.kv_heads, shape.dimension},
                             shape.numbers());
    }
    const auto tokens = at::tensor(prompt, at::kLong).to(shape.on);
    at::Tensor x;
    for (std::int64_t from = 0; from < length; from += chunk) {
        x = prefill_chunk(tokens.narrow(0, from, std::min(chunk, length - from)), stream);
    }
    for (auto*& buffer : leaving_to_) {
        if (auto* const left = std::exchange(buffer, nullptr)) {
            left->before(stream);
        }
    }
    leaving_.reset();
    if (contents_.streams == Streams::keys_and_values) {
        // The first layers of the next step are being copied; resident layers are not.
        planned_ += 2 * static_cast<std::uint64_t>(cold_tokens_) * shape.row_bytes() *
                    ring_.schedule().slots;
        again_ = contents_.host.size() - streamed();
    }
    x = to_unit_scale(x.narrow(0, x.size(0) - 1, 1));
    return {at::mm(x, contents_.head).argmax(-1).item<std::int64_t>(), x};
}

at::Tensor Decoder::prefill_chunk(const at::Tensor& tokens, void* stream) {
    const auto& shape = contents_.shape;
    const bool weights = contents_.streams == Streams::weights;
    const auto group = shape.heads / shape.kv_heads;
    const auto count = tokens.size(0), past = cold_tokens_,
               whole = count / Shape::granule * Shape::granule;
    const auto positions = [&](std::int64_t end) {
        return at::arange(end, shape.numbers().dtype(at::kLong));
    };
    // A token attends to all tokens before the chunk, and to the chunk's tokens up to itself.
    const auto masked = positions(past + count) > (positions(count) + past).unsqueeze(1);
    auto x = contents_.embedding.index_select(0, tokens);
    for (std::int64_t number = 0; number < shape.layers; ++number) {
        const auto unit = static_cast<std::size_t>(number);
        const vmmgraph::UnitScope scope(ring_, unit, stream);
        void* const parameters =
            weights ? scope.address() : contents_.weights[unit].mutable_data_ptr();
        void* const cold = weights ? cold_.select(0, number).mutable_data_ptr() : scope.address();
        const auto qkv = at::mm(to_unit_scale(x), Weights(parameters, shape).qkv)
                             .view({count, -1, shape.dimension});
        const auto query = qkv.narrow(1, 0, shape.heads);
        const auto keys = qkv.narrow(1, shape.heads, shape.kv_heads),
                   values = qkv.narrow(1, shape.heads + shape.kv_heads, shape.kv_heads);
        const auto all = at::from_blob(cold, {2, shape.capacity, shape.kv_heads, shape.dimension},
                                       shape.numbers())
                             .narrow(1, 0, past);
        const auto attended = at::empty({count, shape.heads, shape.dimension}, shape.numbers());
        // One head's keys at a time: the scores of all heads would need more memory than the
        // weights.
        for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
            const auto of_head = [&](std::int64_t side, const at::Tensor& made) {
                return at::cat({all.select(0, side).select(1, head), made.select(1, head)});
            };
            const auto scores = at::matmul(query.narrow(1, head * group, group).transpose(0, 1),
                                           of_head(0, keys).t());
            const auto scaled =
                (scores.to(at::kFloat) * (1 / std::sqrt(static_cast<double>(shape.dimension))))
                    .masked_fill_(masked, -1e30);
            const auto share = at::softmax(scaled, -1).to(at::kBFloat16);
            attended.narrow(1, head * group, group)
                .copy_(at::matmul(share, of_head(1, values)).transpose(0, 1));
        }
        keep(number, keys, values, stream);
        if (!weights) {
            // For the next chunk, which starts reading ahead before this chunk ends.
            set_source(unit, past + whole);
        }
        x = feed_forward(x, parameters, attended.view({count, -1}));
    }
    planned_ +=
        weights ? shape.weight_bytes() * streamed()
                : 2 * static_cast<std::uint64_t>(past) * shape.row_bytes() * contents_.host.size();
    cold_tokens_ = past + whole;
    hot_tokens_ = count - whole;
    return x;
}

void Decoder::keep(std::int64_t number, const at::Tensor& keys, const at::Tensor& values,
                   void* stream) {
    const auto count = keys.size(0), whole = count / Shape::granule * Shape::granule;
    const auto half = static_cast<std::size_t>(number % 2);
    if (contents_.streams == Streams::keys_and_values && whole > 0) {
        auto*& last = leaving_to_[half];
        if (last != nullptr) {
            last->before(stream);
        }
        last = &contents_.host[static_cast<std::size_t>(number)];
    }
    for (std::int64_t side = 0; side < 2; ++side) {
        const auto& made = side == 0 ? keys : values;
        if (whole > 0) {
            auto cold = made.narrow(0, 0, whole);
            if (leaving_.defined()) {
                cold =
                    leaving_.select(0, number % 2).select(0, side).narrow(0, 0, whole).copy_(cold);
            }
            store(number, side, cold, stream);
        }
        hot_.select(0, number)
            .select(0, side)
            .narrow(0, 0, count - whole)
            .copy_(made.narrow(0, whole, count - whole));
    }
}

std::uint64_t Decoder::streamed() const { return ring_.stats().streamed; }

Decoder::Output Decoder::step(std::int64_t token) {
    void* const stream =
        contents_.shape.on.is_cuda() ? c10::cuda::getCurrentCUDAStream().stream() : nullptr;
    if (hot_tokens_ == Shape::granule) {
        flush(stream);
    }
    const std::vector<std::int64_t> tokens{token};
    const std::vector<std::int64_t> now{cold_tokens_, hot_tokens_};
    executor_->run(
        {Key::of(1), Phase::decode}, {{names::tokens, tokens}, {lengths, now}},
        [&] { throw std::runtime_error(executor_->last_failure()); }, stream);
    ++hot_tokens_;
    const auto& shape = contents_.shape;
    const auto of_unit = contents_.streams == Streams::weights
                             ? shape.weight_bytes()
                             : 2 * static_cast<std::uint64_t>(cold_tokens_) * shape.row_bytes();
    planned_ += of_unit * (streamed() + std::exchange(again_, 0));
    return {inputs_.get(next_token).item<std::int64_t>(), inputs_.hidden_states().clone()};
}

void Decoder::body(Recorder& recorder) {
    const auto now = inputs_.get(lengths);
    const auto position = now.narrow(0, 1, 1);
    const auto masked =
        at::cat({cold_positions_ >= now.narrow(0, 0, 1), hot_positions_ > position});
    auto x = contents_.embedding.index_select(0, inputs_.tokens());
    for (std::int64_t number = 0; number < contents_.shape.layers; ++number) {
        const auto unit = recorder.streamed(static_cast<std::size_t>(number));
        const bool weights = contents_.streams == Streams::weights;
        x = layer(number, x,
                  weights ? unit.address()
                          : contents_.weights[static_cast<std::size_t>(number)].mutable_data_ptr(),
                  weights ? cold_.select(0, number).mutable_data_ptr() : unit.address(), position,
                  masked);
    }
    x = to_unit_scale(x);
    inputs_.hidden_states().copy_(x);
    inputs_.get(next_token).copy_(at::mm(x, contents_.head).argmax(-1));
}

at::Tensor Decoder::layer(std::int64_t number, const at::Tensor& x, void* weights, void* cold,
                          const at::Tensor& position, const at::Tensor& masked) {
    const auto& shape = contents_.shape;
    const Weights w(weights, shape);
    const auto group = shape.heads / shape.kv_heads;
    const auto qkv = at::mm(to_unit_scale(x), w.qkv);
    const auto part = [&](std::int64_t from, std::int64_t heads) {
        return qkv.narrow(1, from * shape.dimension, heads * shape.dimension);
    };
    const auto query = part(0, shape.heads).reshape({shape.kv_heads, group, shape.dimension});
    for (std::int64_t side = 0; side < 2; ++side) {
        const auto made = part(shape.heads + side * shape.kv_heads, shape.kv_heads)
                              .reshape({1, shape.kv_heads, shape.dimension});
        hot_.select(0, number).select(0, side).index_copy_(0, position, made);
    }
    const auto all =
        at::from_blob(cold, {2, shape.capacity, shape.kv_heads, shape.dimension}, shape.numbers());
    const auto by_head = [](const at::Tensor& tokens) { return tokens.transpose(0, 1); };
    const auto keys = by_head(all.select(0, 0)), values = by_head(all.select(0, 1));
    const auto hot_keys = by_head(hot_.select(0, number).select(0, 0)),
               hot_values = by_head(hot_.select(0, number).select(0, 1));
    const auto scores = at::cat(
        {at::matmul(query, keys.transpose(1, 2)), at::matmul(query, hot_keys.transpose(1, 2))}, -1);
    const auto scaled =
        (scores.to(at::kFloat) * (1 / std::sqrt(static_cast<double>(shape.dimension))))
            .masked_fill(masked, -1e30);
    const auto share = at::softmax(scaled, -1).to(at::kBFloat16);
    const auto attended = at::matmul(share.narrow(-1, 0, shape.capacity), values) +
                          at::matmul(share.narrow(-1, shape.capacity, Shape::granule), hot_values);
    return feed_forward(x, weights, attended.reshape({1, shape.heads * shape.dimension}));
}

at::Tensor Decoder::feed_forward(const at::Tensor& x, void* weights,
                                 const at::Tensor& attended) const {
    const Weights w(weights, contents_.shape);
    const auto y = x + at::mm(attended, w.out);
    const auto z = to_unit_scale(y);
    return y + at::mm(at::silu(at::mm(z, w.gate)) * at::mm(z, w.up), w.down);
}

}  // namespace offload_example
