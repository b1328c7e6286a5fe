// A decoder whose keys and values, or whose weights, stream from the host: one graph a step, layer after layer through a few slots of a ring.
//
// Attention reads two parts: the cold one, whole granules of tokens that never change, at the addresses of the layer's unit; and the hot one, the last
// tokens, which the graph writes and which stay on the device. A granule that is full goes to the host between two steps. A prompt comes in chunks,
// eagerly and through the same ring: what is cold is read layer after layer, and what a chunk adds goes to the host beside the next layers.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <vmmgraph/engine.hpp>

namespace offload_example {

enum class Streams { keys_and_values, weights };

struct Shape {
    std::int64_t layers = 36;
    std::int64_t hidden = 2048;
    std::int64_t heads = 16;
    std::int64_t kv_heads = 8;
    std::int64_t dimension = 128;
    std::int64_t inner = 6144;
    std::int64_t vocabulary = 8192;
    // Tokens that are there before the first step, all cold.
    std::int64_t context = 4096;
    // Cold tokens that there is room for.
    std::int64_t capacity = 4096;
    // On a CPU nothing is captured, and the ring is the host driver's.
    at::Device on = at::kCUDA;

    // Tokens that become cold together.
    static constexpr std::int64_t granule = 128;

    // Bytes of a token's keys, or of its values, in a layer.
    [[nodiscard]] std::uint64_t row_bytes() const { return static_cast<std::uint64_t>(kv_heads * dimension) * 2; }
    [[nodiscard]] std::uint64_t cold_bytes() const { return 2 * static_cast<std::uint64_t>(capacity) * row_bytes(); }
    [[nodiscard]] std::uint64_t weight_bytes() const;
    [[nodiscard]] at::TensorOptions numbers() const { return at::TensorOptions().dtype(at::kBFloat16).device(on); }
};

// What decoders of one model share: the contents of what streams, on the host, and everything else, on the device.
struct Contents {
    Contents(const vmmgraph::Device& device, const Shape& shape, Streams streams);

    [[nodiscard]] std::uint64_t unit_bytes() const { return streams == Streams::weights ? shape.weight_bytes() : shape.cold_bytes(); }
    [[nodiscard]] std::vector<vmmgraph::RingUnit> units(bool resident) const;

    const vmmgraph::Device& device;
    Shape shape;
    Streams streams;
    // By layer.
    std::deque<vmmgraph::HostBuffer> host;
    // By layer, what does not stream: its weights, or its cold keys and values.
    std::vector<at::Tensor> weights;
    at::Tensor cold;
    // [layer][keys, values][token][head][dimension], as the prompt left them.
    at::Tensor hot;
    at::Tensor embedding;
    at::Tensor head;
};

class Decoder {
public:
    // Captures the step. All of it stays on the device if it is `resident`.
    Decoder(Contents& contents, bool resident, const vmmgraph::RingOptions& options);

    struct Output {
        std::int64_t token;
        at::Tensor hidden;
    };
    // Puts one token behind the others; which one is next. On torch's current stream, which it waits for.
    Output step(std::int64_t token);
    // Begins anew with a prompt, so many tokens at a time (whole granules); the token behind it, and the last hidden state. On torch's current stream, which
    // it waits for. What was there before is lost if it throws, and the next call begins anew.
    Output prefill(const std::vector<std::int64_t>& prompt, std::int64_t chunk);

    // Bytes that the steps and prompts so far were to bring from the host.
    [[nodiscard]] std::uint64_t planned_bytes() const noexcept { return planned_; }
    [[nodiscard]] std::uint64_t moved_bytes() const { return ring_.stats().copied_bytes - moved_before_; }
    [[nodiscard]] std::uint64_t device_bytes() const { return ring_.stats().device_bytes; }
    [[nodiscard]] std::uint64_t graph_steps() const { return ring_.stats().launches; }
    [[nodiscard]] std::uint64_t inputs_by_kernel() const { return inputs_.copies_by_kernel(); }

private:
    void body(vmmgraph::engine::Recorder& recorder);
    at::Tensor layer(std::int64_t number, const at::Tensor& x, void* weights, void* cold, const at::Tensor& position,
                     const at::Tensor& masked);
    at::Tensor feed_forward(const at::Tensor& x, void* weights, const at::Tensor& attended) const;
    // Puts tokens behind the cold ones; what the last layer makes of them.
    at::Tensor prefill_chunk(const at::Tensor& tokens, void* stream);
    // Keys and values of a layer's new tokens, [token][head][dimension] each: whole granules become cold, the rest is hot.
    void keep(std::int64_t number, const at::Tensor& keys, const at::Tensor& values, void* stream);
    // Units of keys and values are copied from as much as is cold.
    void set_sources();
    void set_source(std::size_t unit, std::int64_t cold_tokens);
    // Keys (0) or values (1) of a layer become cold from `cold_tokens_` on.
    void store(std::int64_t number, std::int64_t side, const at::Tensor& from, void* stream);
    [[nodiscard]] std::uint64_t streamed() const;
    // A full granule becomes cold, behind what the stream has.
    void flush(void* stream);

    Contents& contents_;
    at::Tensor hot_;
    at::Tensor cold_;
    at::Tensor cold_positions_;
    at::Tensor hot_positions_;
    // What the last two layers of a chunk add, on its way to the host: [layer % 2][keys, values][token][head][dimension], and where to.
    at::Tensor leaving_;
    std::array<vmmgraph::HostBuffer*, 2> leaving_to_{};
    std::int64_t cold_tokens_;
    std::int64_t hot_tokens_;
    std::uint64_t planned_ = 0;
    std::uint64_t moved_before_ = 0;
    // Units that the next step is to bring beyond those that stream in it.
    std::uint64_t again_ = 0;
    // Outlives the executor.
    vmmgraph::Ring ring_;
    vmmgraph::engine::GraphInputs inputs_;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_;
    std::unique_ptr<vmmgraph::engine::GraphExecutor> executor_;
};

}  // namespace offload_example
