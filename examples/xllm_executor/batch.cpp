#include "batch.hpp"

#include <algorithm>

namespace xllm_example {

Batch make_batch(const ModelArgs& args, const std::vector<Sequence*>& sequences) {
    std::vector<std::int32_t> tokens, slots, tables, indptr{0}, indices, last_page_len;
    std::vector<std::int32_t> positions[3];
    std::vector<std::int32_t> q_seq_lens{0}, kv_seq_lens{0};
    Batch batch;
    bool prefill = false;
    bool decode = false;
    std::size_t columns = 0;
    for (const auto* sequence : sequences) {
        columns = std::max(columns, sequence->blocks.size());
    }
    for (auto* const sequence : sequences) {
        const auto length = static_cast<std::int64_t>(sequence->tokens.size());
        (sequence->in_cache == 0 ? prefill : decode) = true;
        for (std::int64_t place = sequence->in_cache; place < length; ++place) {
            tokens.push_back(sequence->tokens[static_cast<std::size_t>(place)]);
            positions[0].push_back(static_cast<std::int32_t>(place));
            positions[1].push_back(static_cast<std::int32_t>(place / 2));
            positions[2].push_back(static_cast<std::int32_t>(place % 7));
            const auto block = sequence->blocks[static_cast<std::size_t>(place / args.block_size)];
            slots.push_back(
                static_cast<std::int32_t>(block * args.block_size + place % args.block_size));
        }
        q_seq_lens.push_back(static_cast<std::int32_t>(tokens.size()));
        kv_seq_lens.push_back(kv_seq_lens.back() + static_cast<std::int32_t>(length));
        for (std::size_t i = 0; i < columns; ++i) {
            tables.push_back(i < sequence->blocks.size() ? sequence->blocks[i] : 0);
            if (static_cast<std::int64_t>(i) * args.block_size < length) {
                indices.push_back(sequence->blocks[i]);
            }
        }
        indptr.push_back(static_cast<std::int32_t>(indices.size()));
        last_page_len.push_back(static_cast<std::int32_t>((length - 1) % args.block_size + 1));
        batch.rows.push_back(static_cast<std::int64_t>(tokens.size()) - 1);
        sequence->in_cache = length;
    }
    using vmmgraph::engine::Phase;
    const auto ints = [](const std::vector<std::int32_t>& of) { return at::tensor(of, at::kInt); };
    auto& input = batch.input;
    input.token_ids = ints(tokens);
    input.positions = args.multimodal
                          ? at::stack({ints(positions[0]), ints(positions[1]), ints(positions[2])})
                          : ints(positions[0]);
    auto& params = input.input_params;
    params.meta.batch_forward_type = prefill && decode ? Phase::mixed
                                     : prefill         ? Phase::prefill
                                                       : Phase::decode;
    params.meta.num_sequences = static_cast<std::int32_t>(sequences.size());
    params.attention.host = {q_seq_lens, kv_seq_lens};
    const auto block_tables = ints(tables).view({params.meta.num_sequences, -1});
    params.attention.device = {ints(kv_seq_lens), ints(slots),   block_tables,
                               ints(indptr),      ints(indices), ints(last_page_len)};
    return batch;
}

}  // namespace xllm_example
