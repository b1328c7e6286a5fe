// A small decoder as engines have it: paged KV cache, block tables, RMSNorm, RoPE, grouped-query attention, SwiGLU. Plain ATen, so that it
// runs on any device and in any dtype.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/ATen.h>

namespace xllm_example {

struct ModelArgs {
    std::int64_t layers = 2;
    std::int64_t hidden = 256;
    std::int64_t heads = 8;
    std::int64_t kv_heads = 2;
    std::int64_t head_dim = 32;
    std::int64_t intermediate = 512;
    std::int64_t vocabulary = 1000;
    // Tokens of a cache block, blocks of the cache, and most blocks of a sequence. Block 0 is nobody's: padding writes there.
    std::int64_t block_size = 16;
    std::int64_t blocks = 512;
    std::int64_t blocks_of_sequence = 6;
    at::TensorOptions options;
};

// One layer's cache: [blocks, block_size, kv_heads, head_dim] each.
struct KVCache {
    at::Tensor k;
    at::Tensor v;
};

// What forward() reads, all on the device, 32-bit integers.
struct ModelInput {
    at::Tensor tokens;
    at::Tensor positions;
    at::Tensor new_cache_slots;
};

class Decoder {
public:
    // Attention of a layer's queries [tokens, heads, head_dim] over its cache, written to `out` [tokens, heads * head_dim].
    using Attention = std::function<void(const at::Tensor& q, const KVCache& cache, const at::Tensor& out)>;

    // Random weights of a fixed seed.
    explicit Decoder(const ModelArgs& args);

    [[nodiscard]] const ModelArgs& args() const noexcept { return args_; }
    [[nodiscard]] std::vector<KVCache> make_caches() const;
    // Hidden states [tokens, hidden]; writes keys and values into the caches.
    [[nodiscard]] at::Tensor forward(const ModelInput& input, const std::vector<KVCache>& caches, const Attention& attention) const;
    // The likeliest next tokens behind these hidden states.
    [[nodiscard]] at::Tensor greedy(const at::Tensor& hidden) const;

    // One query for each sequence, over all of its blocks, masked by its length: of fixed shapes, so a graph can hold it.
    void attend_decode(const at::Tensor& q, const KVCache& cache, const at::Tensor& block_tables, const at::Tensor& kv_seq_lens,
                       const at::Tensor& out) const;
    // Sequences of any lengths, which the host must know: no graph can hold it.
    void attend_ragged(const at::Tensor& q, const KVCache& cache, const at::Tensor& block_tables, const std::vector<std::int32_t>& q_seq_lens,
                       const std::vector<std::int32_t>& kv_seq_lens, const at::Tensor& out) const;

private:
    struct Layer {
        at::Tensor qkv, out, gate_up, down, attention_norm, mlp_norm;
    };

    [[nodiscard]] at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;
    [[nodiscard]] at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) const;

    ModelArgs args_;
    at::Tensor embedding_, final_norm_, head_, cos_, sin_;
    // 0, 1, ... over the longest sequence.
    at::Tensor places_;
    std::vector<Layer> layers_;
};

}  // namespace xllm_example
