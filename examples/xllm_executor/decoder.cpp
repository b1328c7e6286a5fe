#include "decoder.hpp"

#include <cmath>
#include <limits>

namespace xllm_example {

Decoder::Decoder(const ModelArgs& args) : args_(args) {
    at::manual_seed(17);
    // On the CPU first, so the model is the same on every device.
    const auto cpu = at::TensorOptions().dtype(at::kDouble);
    const auto weight = [&](std::int64_t in, std::int64_t out) {
        return (at::randn({in, out}, at::kFloat) / std::sqrt(static_cast<double>(in)))
            .to(args.options);
    };
    const auto near_one = [&] {
        return (at::ones({args.hidden}, at::kFloat) + 0.1 * at::randn({args.hidden}, at::kFloat))
            .to(args.options);
    };
    embedding_ = at::randn({args.vocabulary, args.hidden}, at::kFloat).to(args.options);
    head_ = weight(args.hidden, args.vocabulary);
    final_norm_ = near_one();
    for (std::int64_t i = 0; i < args.layers; ++i) {
        layers_.push_back({weight(args.hidden, (args.heads + 2 * args.kv_heads) * args.head_dim),
                           weight(args.heads * args.head_dim, args.hidden),
                           weight(args.hidden, 2 * args.intermediate),
                           weight(args.intermediate, args.hidden), near_one(), near_one()});
    }
    const auto longest = args.blocks_of_sequence * args.block_size;
    const auto frequency = at::pow(10000.0, -at::arange(0, args.head_dim, 2, cpu) / args.head_dim);
    const auto angles = at::outer(at::arange(0, longest, cpu), frequency);
    cos_ = angles.cos().to(args.options);
    sin_ = angles.sin().to(args.options);
    places_ = at::arange(0, longest, at::kInt).to(args.options.device());
}

std::vector<KVCache> Decoder::make_caches() const {
    const auto make = [&] {
        return at::zeros({args_.blocks, args_.block_size, args_.kv_heads, args_.head_dim},
                         args_.options);
    };
    std::vector<KVCache> caches;
    for (std::int64_t i = 0; i < args_.layers; ++i) {
        caches.push_back({make(), make()});
    }
    return caches;
}

at::Tensor Decoder::norm(const at::Tensor& x, const at::Tensor& weight) const {
    const auto wide = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
    return (wide * (wide.square().mean(-1, true) + 1e-6).rsqrt()).to(x.scalar_type()) * weight;
}

at::Tensor Decoder::rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) const {
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

at::Tensor Decoder::at_positions(const at::Tensor& of, const at::Tensor& positions) const {
    if (positions.dim() == 1) {
        return of.index_select(0, positions).unsqueeze(1);
    }
    const auto third = of.size(1) / 3;
    const auto part = [&](std::int64_t row, std::int64_t length) {
        return of.narrow(1, row * third, length).index_select(0, positions[row]);
    };
    return at::cat({part(0, third), part(1, third), part(2, of.size(1) - 2 * third)}, 1)
        .unsqueeze(1);
}

at::Tensor Decoder::forward(const at::Tensor& tokens, const at::Tensor& positions,
                            const std::vector<KVCache>& caches,
                            const ModelInputParams& params) const {
    const auto n = tokens.size(0);
    const auto& metadata = *params.attn_metadata;
    // By block and offset, since the blocks of a cache may have gaps between.
    const auto slots = metadata.slot_mapping.to(at::kLong);
    const auto block = at::floor_divide(slots, args_.block_size),
               offset = at::remainder(slots, args_.block_size);
    const auto cos = at_positions(cos_, positions);
    const auto sin = at_positions(sin_, positions);
    const auto& embedded = params.embedding.input_embedding;
    auto x = embedded.defined() ? embedded : embedding_.index_select(0, tokens);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const auto& layer = layers_[i];
        const auto qkv = at::mm(norm(x, layer.attention_norm), layer.qkv)
                             .view({n, args_.heads + 2 * args_.kv_heads, args_.head_dim});
        const auto parts = qkv.split_with_sizes({args_.heads, args_.kv_heads, args_.kv_heads}, 1);
        const auto q = rope(parts[0], cos, sin);
        caches[i].k.index_put_({block, offset}, rope(parts[1], cos, sin));
        caches[i].v.index_put_({block, offset}, parts[2]);
        const auto attended = at::empty({n, args_.heads * args_.head_dim}, args_.options);
        attention(q, caches[i], metadata, attended);
        x = x + at::mm(attended, layer.out);
        const auto gate_up = at::mm(norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1);
        x = x + at::mm(at::silu(gate_up[0]) * gate_up[1], layer.down);
    }
    return norm(x, final_norm_);
}

at::Tensor Decoder::greedy(const at::Tensor& hidden) const {
    return at::mm(hidden, head_).argmax(-1);
}

void Decoder::attend_decode(const at::Tensor& q, const KVCache& cache,
                            const at::Tensor& block_tables, const at::Tensor& kv_seq_lens,
                            const at::Tensor& out) const {
    const auto batch = q.size(0);
    const auto longest = block_tables.size(1) * args_.block_size;
    const auto gather = [&](const at::Tensor& of) {
        return of.index_select(0, block_tables.reshape({-1}))
            .view({batch, longest, args_.kv_heads, args_.head_dim});
    };
    const auto grouped =
        q.view({batch, args_.kv_heads, args_.heads / args_.kv_heads, args_.head_dim});
    const auto beyond = places_.narrow(0, 0, longest).unsqueeze(0) >= kv_seq_lens.unsqueeze(1);
    const auto scores = (at::matmul(grouped, gather(cache.k).permute({0, 2, 3, 1})) /
                         std::sqrt(static_cast<double>(args_.head_dim)))
                            .masked_fill(beyond.view({batch, 1, 1, longest}),
                                         -std::numeric_limits<double>::infinity());
    // 0 times NaN is NaN, and positions without a token are undefined: mask the values too.
    const auto values = gather(cache.v).masked_fill(beyond.view({batch, longest, 1, 1}), 0);
    const auto attended = at::matmul(scores.softmax(-1), values.permute({0, 2, 1, 3}));
    out.copy_(attended.reshape({batch, args_.heads * args_.head_dim}));
}

void Decoder::attend_ragged(const at::Tensor& q, const KVCache& cache,
                            const at::Tensor& block_tables, const PlanInfo& plan,
                            const at::Tensor& out) const {
    for (std::size_t i = 0; i + 1 < plan.q_cu_seq_lens.size(); ++i) {
        const std::int64_t start = plan.q_cu_seq_lens[i];
        const std::int64_t queries = plan.q_cu_seq_lens[i + 1] - start;
        const std::int64_t keys = plan.kv_cu_seq_lens[i + 1] - plan.kv_cu_seq_lens[i];
        if (queries == 0) {
            continue;
        }
        const auto blocks = block_tables[static_cast<std::int64_t>(i)].narrow(
            0, 0, (keys + args_.block_size - 1) / args_.block_size);
        const auto gather = [&](const at::Tensor& of) {
            return of.index_select(0, blocks)
                .view({-1, args_.kv_heads, 1, args_.head_dim})
                .narrow(0, 0, keys);
        };
        const auto grouped =
            q.narrow(0, start, queries)
                .view({queries, args_.kv_heads, args_.heads / args_.kv_heads, args_.head_dim})
                .permute({1, 2, 0, 3});
        const auto beyond = places_.narrow(0, 0, keys).unsqueeze(0) >
                            places_.narrow(0, keys - queries, queries).unsqueeze(1);
        const auto scores = (at::matmul(grouped, gather(cache.k).permute({1, 2, 3, 0})) /
                             std::sqrt(static_cast<double>(args_.head_dim)))
                                .masked_fill(beyond, -std::numeric_limits<double>::infinity());
        const auto attended = at::matmul(scores.softmax(-1), gather(cache.v).permute({1, 2, 0, 3}));
        out.narrow(0, start, queries)
            .copy_(attended.permute({2, 0, 1, 3}).reshape({queries, args_.heads * args_.head_dim}));
    }
    // Zero the padding rows: NaNs would spread through the cache's padding block.
    const std::int64_t end = plan.q_cu_seq_lens.empty() ? 0 : plan.q_cu_seq_lens.back();
    out.narrow(0, end, out.size(0) - end).zero_();
}

}  // namespace xllm_example
