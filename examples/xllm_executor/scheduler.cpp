#include "scheduler.hpp"

#include <algorithm>

namespace xllm_example {

void Scheduler::join() {
    const auto longest = args_.blocks_of_sequence * args_.block_size;
    auto& sequence = running_.emplace_back();
    const auto prompt = pick(2, longest / 4);
    for (std::int64_t i = 0; i < prompt; ++i) {
        sequence.tokens.push_back(static_cast<std::int32_t>(pick(0, args_.vocabulary - 1)));
    }
    sequence.wanted = prompt + pick(1, longest - prompt - 1);
    for (std::int64_t i = 0; i * args_.block_size < sequence.wanted; ++i) {
        sequence.blocks.push_back(free_.back());
        free_.pop_back();
    }
    ++joined_;
}

ForwardInput Scheduler::next() {
    // In every second step or so, as many as there is room for but four; for a hundred steps until all is full, then until little is left.
    const std::size_t room = step_++ / 100 % 2 == 0 ? most_ : most_ / 8;
    const bool joins = running_.empty() || pick(0, 1) == 0;
    for (int i = 0; i < 4 && joins && running_.size() < room; ++i) {
        join();
    }
    std::vector<std::int32_t> tokens, slots, tables, indptr{0}, indices, last_page_len;
    std::vector<std::int32_t> positions[3];
    std::vector<std::int32_t> q_seq_lens{0}, kv_seq_lens{0};
    rows_.clear();
    bool prefill = false;
    bool decode = false;
    std::size_t columns = 0;
    for (const auto& sequence : running_) {
        columns = std::max(columns, sequence.blocks.size());
    }
    for (auto& sequence : running_) {
        const auto length = static_cast<std::int64_t>(sequence.tokens.size());
        (sequence.in_cache == 0 ? prefill : decode) = true;
        for (std::int64_t place = sequence.in_cache; place < length; ++place) {
            tokens.push_back(sequence.tokens[static_cast<std::size_t>(place)]);
            // As if there were images: time, height and width.
            positions[0].push_back(static_cast<std::int32_t>(place));
            positions[1].push_back(static_cast<std::int32_t>(place / 2));
            positions[2].push_back(static_cast<std::int32_t>(place % 7));
            const auto block = sequence.blocks[static_cast<std::size_t>(place / args_.block_size)];
            slots.push_back(static_cast<std::int32_t>(block * args_.block_size + place % args_.block_size));
        }
        q_seq_lens.push_back(static_cast<std::int32_t>(tokens.size()));
        kv_seq_lens.push_back(kv_seq_lens.back() + static_cast<std::int32_t>(length));
        for (std::size_t i = 0; i < columns; ++i) {
            tables.push_back(i < sequence.blocks.size() ? sequence.blocks[i] : 0);
            if (static_cast<std::int64_t>(i) * args_.block_size < length) {
                indices.push_back(sequence.blocks[i]);
            }
        }
        indptr.push_back(static_cast<std::int32_t>(indices.size()));
        last_page_len.push_back(static_cast<std::int32_t>((length - 1) % args_.block_size + 1));
        rows_.push_back(static_cast<std::int64_t>(tokens.size()) - 1);
        sequence.in_cache = length;
    }
    using vmmgraph::engine::Phase;
    const auto ints = [](const std::vector<std::int32_t>& of) { return at::tensor(of, at::kInt); };
    ForwardInput input;
    input.token_ids = ints(tokens);
    input.positions = args_.multimodal ? at::stack({ints(positions[0]), ints(positions[1]), ints(positions[2])}) : ints(positions[0]);
    auto& params = input.input_params;
    params.meta.batch_forward_type = prefill && decode ? Phase::mixed : prefill ? Phase::prefill : Phase::decode;
    params.meta.num_sequences = static_cast<std::int32_t>(running_.size());
    params.attention.host = {q_seq_lens, kv_seq_lens};
    const auto block_tables = ints(tables).view({params.meta.num_sequences, -1});
    params.attention.device = {ints(kv_seq_lens), ints(slots), block_tables, ints(indptr), ints(indices), ints(last_page_len)};
    if (args_.multimodal && prefill && pick(0, 1) == 0) {
        // Every bit of it is some token's.
        params.embedding.input_embedding = (at::outer(input.token_ids, at::arange(1, args_.hidden + 1, at::kInt)) % 17 / 8.0 - 1)
                                               .to(c10::typeMetaToScalarType(args_.options.dtype()));
    }
    return input;
}

void Scheduler::take(const std::vector<std::int64_t>& tokens) {
    std::vector<Sequence> stay;
    for (std::size_t i = 0; i < running_.size(); ++i) {
        auto& sequence = running_[i];
        sequence.tokens.push_back(static_cast<std::int32_t>(tokens[i]));
        if (static_cast<std::int64_t>(sequence.tokens.size()) < sequence.wanted) {
            stay.push_back(std::move(sequence));
            continue;
        }
        free_.insert(free_.end(), sequence.blocks.begin(), sequence.blocks.end());
        ++left_;
    }
    running_ = std::move(stay);
}

}  // namespace xllm_example
