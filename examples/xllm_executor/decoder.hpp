// Small decoder with an engine's structure: paged KV cache, block tables, RMSNorm, RoPE,
// grouped-query attention, SwiGLU. Plain ATen, for any device and dtype.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "model_input_params.hpp"

namespace xllm_example {

struct ModelArgs {
    std::int64_t layers = 2;
    std::int64_t hidden = 256;
    std::int64_t heads = 8;
    std::int64_t kv_heads = 2;
    std::int64_t head_dim = 32;
    std::int64_t intermediate = 512;
    std::int64_t vocabulary = 1000;
    // Tokens per cache block, blocks of the cache, and maximum blocks of a sequence. Block 0 is
    // reserved for padding.
    std::int64_t block_size = 16;
    std::int64_t blocks = 512;
    std::int64_t blocks_of_sequence = 6;
    // Positions [3, tokens] with a third of the rotary dimensions each, and steps with given
    // embeddings.
    bool multimodal = false;
    at::TensorOptions options;
};

// One layer's cache: [blocks, block_size, kv_heads, head_dim] each.
struct KVCache {
    at::Tensor k;
    at::Tensor v;
};

class Decoder {
public:
    // Random weights with a fixed seed.
    explicit Decoder(const ModelArgs& args);

    [[nodiscard]] const ModelArgs& args() const noexcept { return args_; }
    [[nodiscard]] std::vector<KVCache> make_caches() const;
    // Returns hidden states [tokens, hidden]; writes keys and values to the caches. Integers are
    // 32-bit and on the device.
    [[nodiscard]] at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions,
                                     const std::vector<KVCache>& caches,
                                     const ModelInputParams& params) const;
    // Returns the most likely next tokens for these hidden states.
    [[nodiscard]] at::Tensor greedy(const at::Tensor& hidden) const;

    // One query per sequence over all of its blocks, masked by its length. The shapes are fixed, so
    // a graph can contain it.
    void attend_decode(const at::Tensor& q, const KVCache& cache, const at::Tensor& block_tables,
                       const at::Tensor& kv_seq_lens, const at::Tensor& out) const;
    // Sequences of any lengths, which the host must know, so a graph cannot contain it.
    void attend_ragged(const at::Tensor& q, const KVCache& cache, const at::Tensor& block_tables,
                       const PlanInfo& plan, const at::Tensor& out) const;

private:
    struct Layer {
        at::Tensor qkv, out, gate_up, down, attention_norm, mlp_norm;
    };

    [[nodiscard]] at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;
    // Selects cosines or sines of the angles, [tokens, 1, head_dim / 2].
    [[nodiscard]] at::Tensor at_positions(const at::Tensor& of, const at::Tensor& positions) const;
    // Attention of a layer's queries [tokens, heads, head_dim] over its cache, written to `out`
    // [tokens, heads * head_dim].
    void attention(const at::Tensor& q, const KVCache& cache, const AttentionMetadata& metadata,
                   const at::Tensor& out) const;
    [[nodiscard]] at::Tensor rope(const at::Tensor& x, const at::Tensor& cos,
                                  const at::Tensor& sin) const;

    ModelArgs args_;
    at::Tensor embedding_, final_norm_, head_, cos_, sin_;
    at::Tensor places_;
    std::vector<Layer> layers_;
};

}  // namespace xllm_example
