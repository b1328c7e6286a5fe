// Llama-shaped decoder with random bf16 weights. Persistent data of a captured forward (weights, KV
// cache, token ids, positions, logits) is outside all graph memory.

#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "options.hpp"

namespace shootout {

class Model {
public:
    Model(const Options& options, std::int64_t max_rows, std::int64_t max_tokens, at::Device device)
        : o_(options),
          ids(at::zeros({max_tokens}, at::TensorOptions(device).dtype(at::kLong))),
          logits(at::zeros({max_rows, options.vocabulary},
                           at::TensorOptions(device).dtype(at::kFloat))) {
        const auto bf16 = at::TensorOptions(device).dtype(at::kBFloat16);
        const auto floats = at::TensorOptions(device).dtype(at::kFloat);
        at::manual_seed(o_.seed);
        const auto random = [&](at::IntArrayRef sizes, double scale) {
            return at::empty(sizes, bf16).normal_(0, scale);
        };
        const auto weight = [&](std::int64_t out, std::int64_t in) {
            return random({out, in}, 1 / std::sqrt(static_cast<double>(in)));
        };
        const std::int64_t q = o_.heads * o_.head_dim;
        const std::int64_t kv = o_.kv_heads * o_.head_dim;
        embedding_ = random({o_.vocabulary, o_.hidden}, 1);
        for (std::int64_t i = 0; i < o_.layers; ++i) {
            Layer layer;
            layer.attention_norm = at::ones({o_.hidden}, bf16);
            layer.mlp_norm = at::ones({o_.hidden}, bf16);
            layer.qkv = weight(q + 2 * kv, o_.hidden);
            layer.o = weight(o_.hidden, q);
            layer.gate_up = weight(2 * o_.intermediate, o_.hidden);
            layer.down = weight(o_.hidden, o_.intermediate);
            layer.keys = random({max_rows, o_.kv_heads, o_.context, o_.head_dim}, 1);
            layer.values = random({max_rows, o_.kv_heads, o_.context, o_.head_dim}, 1);
            layers_.push_back(std::move(layer));
        }
        norm_ = at::ones({o_.hidden}, bf16);
        head_ = weight(o_.vocabulary, o_.hidden);

        const std::int64_t positions = std::max(max_tokens, o_.context);
        const at::Tensor frequency =
            at::pow(1e6, at::arange(0, o_.head_dim, 2, floats) / static_cast<double>(o_.head_dim))
                .reciprocal();
        const at::Tensor angle = at::outer(at::arange(positions, floats), frequency);
        cos_ = angle.cos().to(at::kBFloat16);
        sin_ = angle.sin().to(at::kBFloat16);
        // Decode: every sequence writes the last slot of its cache and attends to the whole cache.
        // Prefill: 0, 1, 2 ...
        decode_positions_ = at::full({max_rows}, o_.context - 1, ids.options());
        prefill_positions_ = at::arange(max_tokens, ids.options());
    }

    // Reads `ids` and writes the first shape.rows() rows of `logits`, without host synchronisation.
    // Tensors live as long as in a Python forward, so the captured lifetimes match the design's
    // trace.
    void forward(const Shape& shape) {
        const std::int64_t tokens = shape.tokens;
        const at::Tensor positions =
            (shape.decode ? decode_positions_ : prefill_positions_).narrow(0, 0, tokens);
        const at::Tensor cos = cos_.index_select(0, positions).unsqueeze(1);
        const at::Tensor sin = sin_.index_select(0, positions).unsqueeze(1);

        at::Tensor x = at::embedding(embedding_, ids.narrow(0, 0, tokens));
        at::Tensor h, qkv, attended, gate_up;
        for (Layer& layer : layers_) {
            h = normalized(x, layer.attention_norm);
            qkv = at::linear(h, layer.qkv);
            attended = attention(layer, shape, qkv, positions, cos, sin);
            x = x + at::linear(attended, layer.o);
            h = normalized(x, layer.mlp_norm);
            gate_up = at::linear(h, layer.gate_up);
            at::Tensor mlp = at::silu(gate_up.narrow(1, 0, o_.intermediate)) *
                             gate_up.narrow(1, o_.intermediate, o_.intermediate);
            mlp = at::linear(mlp, layer.down);
            x = x + mlp;
        }
        h = normalized(x, norm_);
        const at::Tensor last = shape.decode ? h : h.narrow(0, tokens - 1, 1);
        const at::Tensor result = at::linear(last, head_).to(at::kFloat);
        logits.narrow(0, 0, shape.rows()).copy_(result);
    }

private:
    struct Layer {
        at::Tensor attention_norm, mlp_norm, qkv, o, gate_up, down, keys, values;
    };

    at::Tensor normalized(const at::Tensor& x, const at::Tensor& weight) const {
        return at::rms_norm(x, {o_.hidden}, weight, 1e-6);
    }

    // Shape [tokens, heads * head_dim].
    at::Tensor attention(Layer& layer, const Shape& shape, const at::Tensor& qkv,
                         const at::Tensor& positions, const at::Tensor& cos,
                         const at::Tensor& sin) const {
        const std::int64_t tokens = shape.tokens;
        const std::int64_t rotated_heads = o_.heads + o_.kv_heads;
        const std::int64_t d = o_.head_dim;
        // RoPE of the query and key heads, which are adjacent.
        const at::Tensor halves =
            qkv.narrow(1, 0, rotated_heads * d).view({tokens, rotated_heads, 2, d / 2});
        const at::Tensor first = halves.select(2, 0);
        const at::Tensor second = halves.select(2, 1);
        const at::Tensor rotated = at::empty({tokens, rotated_heads, 2, d / 2}, qkv.options());
        at::Tensor rotated_first = rotated.select(2, 0);
        at::Tensor rotated_second = rotated.select(2, 1);
        at::mul_out(rotated_first, first, cos);
        rotated_first.addcmul_(second, sin, -1);
        at::mul_out(rotated_second, second, cos);
        rotated_second.addcmul_(first, sin);
        const at::Tensor heads = rotated.view({tokens, rotated_heads, d});
        const at::Tensor q = heads.narrow(1, 0, o_.heads);
        const at::Tensor k = heads.narrow(1, o_.heads, o_.kv_heads);
        const at::Tensor v =
            qkv.narrow(1, rotated_heads * d, o_.kv_heads * d).view({tokens, o_.kv_heads, d});
        const bool grouped = o_.heads != o_.kv_heads;

        if (shape.decode) {
            const at::Tensor slot =
                positions.view({tokens, 1, 1, 1}).expand({tokens, o_.kv_heads, 1, d});
            at::Tensor keys = layer.keys.narrow(0, 0, tokens);
            at::Tensor values = layer.values.narrow(0, 0, tokens);
            keys.scatter_(2, slot, k.unsqueeze(2));
            values.scatter_(2, slot, v.unsqueeze(2));
            return at::scaled_dot_product_attention(q.unsqueeze(2), keys, values, {}, 0.0, false,
                                                    std::nullopt, grouped)
                .reshape({tokens, o_.heads * d});
        }
        const auto sequence = [](const at::Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
        return at::scaled_dot_product_attention(sequence(q), sequence(k), sequence(v), {}, 0.0,
                                                true, std::nullopt, grouped)
            .squeeze(0)
            .transpose(0, 1)
            .reshape({tokens, o_.heads * d});
    }

    Options o_;
    at::Tensor embedding_, norm_, head_, cos_, sin_, decode_positions_, prefill_positions_;
    std::vector<Layer> layers_;

public:
    // Token ids, read by every forward; the first shape.tokens are used.
    at::Tensor ids;
    // Float32; decode writes one row per sequence, prefill one row.
    at::Tensor logits;
};

}  // namespace shootout
