// Decoder with keys and values, or weights, streamed from the host: one graph per step, layer by
// layer through a few slots of a ring.
//
// Attention reads a cold part, of whole granules at the layer's unit, and a hot part on the device
// with the last tokens. A full granule is copied to the host between two steps. Prompts run eagerly
// in chunks through the same ring.
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
    // Tokens before the first step, all cold.
    std::int64_t context = 4096;
    // Capacity for cold tokens.
    std::int64_t capacity = 4096;
    // On a CPU nothing is captured, and the ring uses the host driver.
    at::Device on = at::kCUDA;

    // Number of tokens that become cold together.
    static constexpr std::int64_t granule = 128;

    [[nodiscard]] std::uint64_t row_bytes() const {
        return static_cast<std::uint64_t>(kv_heads * dimension) * 2;
    }
    [[nodiscard]] std::uint64_t cold_bytes() const {
        return 2 * static_cast<std::uint64_t>(capacity) * row_bytes();
    }
    [[nodiscard]] std::uint64_t weight_bytes() const;
    [[nodiscard]] at::TensorOptions numbers() const {
        return at::TensorOptions().dtype(at::kBFloat16).device(on);
    }
};

// Shared by decoders of one model: the streamed contents on the host, and all other data on the
// device.
struct Contents {
    Contents(const vmmgraph::Device& device, const Shape& shape, Streams streams);

    [[nodiscard]] std::uint64_t unit_bytes() const {
        return streams == Streams::weights ? shape.weight_bytes() : shape.cold_bytes();
    }
    [[nodiscard]] std::vector<vmmgraph::RingUnit> units(bool resident) const;

    const vmmgraph::Device& device;
    Shape shape;
    Streams streams;
    std::deque<vmmgraph::HostBuffer> host;
    // Contents not streamed, by layer: the weights, or the cold keys and values.
    std::vector<at::Tensor> weights;
    at::Tensor cold;
    // [layer][keys, values][token][head][dimension], after the prompt.
    at::Tensor hot;
    at::Tensor embedding;
    at::Tensor head;
};

class Decoder {
public:
    // Captures the step. With `resident`, everything stays on the device.
    Decoder(Contents& contents, bool resident, const vmmgraph::RingOptions& options);

    struct Output {
        std::int64_t token;
        at::Tensor hidden;
    };
    // Appends one token and returns the next. Runs on torch's current stream, and waits for it.
    Output step(std::int64_t token);
    // Restarts with a prompt, `chunk` tokens at a time (whole granules). Returns the next token and
    // the last hidden state. Waits for torch's current stream. If it throws, the next call
    // restarts.
    Output prefill(const std::vector<std::int64_t>& prompt, std::int64_t chunk);

    // Planned bytes of all steps and prompts from the host.
    [[nodiscard]] std::uint64_t planned_bytes() const noexcept { return planned_; }
    [[nodiscard]] std::uint64_t moved_bytes() const {
        return ring_.stats().copied_bytes - moved_before_;
    }
    [[nodiscard]] std::uint64_t device_bytes() const { return ring_.stats().device_bytes; }
    [[nodiscard]] std::uint64_t graph_steps() const { return ring_.stats().launches; }
    [[nodiscard]] std::uint64_t inputs_by_kernel() const { return inputs_.copies_by_kernel(); }

private:
    void body(vmmgraph::engine::Recorder& recorder);
    at::Tensor layer(std::int64_t number, const at::Tensor& x, void* weights, void* cold,
                     const at::Tensor& position, const at::Tensor& masked);
    at::Tensor feed_forward(const at::Tensor& x, void* weights, const at::Tensor& attended) const;
    // Appends tokens to the cold ones. Returns the output of the last layer.
    at::Tensor prefill_chunk(const at::Tensor& tokens, void* stream);
    // Stores keys and values of a layer's new tokens, [token][head][dimension] each: whole granules
    // become cold, the rest is hot.
    void keep(std::int64_t number, const at::Tensor& keys, const at::Tensor& values, void* stream);
    void set_sources();
    void set_source(std::size_t unit, std::int64_t cold_tokens);
    // Stores a layer's keys (0) or values (1) as cold tokens, from `cold_tokens_` on.
    void store(std::int64_t number, std::int64_t side, const at::Tensor& from, void* stream);
    [[nodiscard]] std::uint64_t streamed() const;
    // Makes a full granule cold, after the stream's current work.
    void flush(void* stream);

    Contents& contents_;
    at::Tensor hot_;
    at::Tensor cold_;
    at::Tensor cold_positions_;
    at::Tensor hot_positions_;
    // Data being copied to the host for a chunk's last two layers: [layer % 2][keys,
    // values][token][head][dimension]; and destinations.
    at::Tensor leaving_;
    std::array<vmmgraph::HostBuffer*, 2> leaving_to_{};
    std::int64_t cold_tokens_;
    std::int64_t hot_tokens_;
    std::uint64_t planned_ = 0;
    std::uint64_t moved_before_ = 0;
    // Units the next step copies in addition to its streamed ones.
    std::uint64_t again_ = 0;
    vmmgraph::Ring ring_;
    vmmgraph::engine::GraphInputs inputs_;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_;
    std::unique_ptr<vmmgraph::engine::GraphExecutor> executor_;
};

}  // namespace offload_example
