#include "scheduler.hpp"

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
    ForwardInput input;
    rows_.clear();
    input.paged_kv_indptr.push_back(0);
    bool prefill = false;
    bool decode = false;
    for (auto& sequence : running_) {
        const auto length = static_cast<std::int64_t>(sequence.tokens.size());
        (sequence.in_cache == 0 ? prefill : decode) = true;
        for (std::int64_t place = sequence.in_cache; place < length; ++place) {
            input.token_ids.push_back(sequence.tokens[static_cast<std::size_t>(place)]);
            input.positions.push_back(static_cast<std::int32_t>(place));
            const auto block = sequence.blocks[static_cast<std::size_t>(place / args_.block_size)];
            input.new_cache_slots.push_back(static_cast<std::int32_t>(block * args_.block_size + place % args_.block_size));
        }
        input.q_seq_lens.push_back(static_cast<std::int32_t>(length - sequence.in_cache));
        input.kv_seq_lens.push_back(static_cast<std::int32_t>(length));
        for (std::int64_t i = 0; i < args_.blocks_of_sequence; ++i) {
            const auto at = static_cast<std::size_t>(i);
            input.block_tables.push_back(at < sequence.blocks.size() ? sequence.blocks[at] : 0);
            if (i * args_.block_size < length) {
                input.paged_kv_indices.push_back(sequence.blocks[at]);
            }
        }
        input.paged_kv_indptr.push_back(static_cast<std::int32_t>(input.paged_kv_indices.size()));
        input.paged_kv_last_page_len.push_back(static_cast<std::int32_t>((length - 1) % args_.block_size + 1));
        input.temperatures.push_back(1.0F);
        rows_.push_back(static_cast<std::int64_t>(input.token_ids.size()) - 1);
        sequence.in_cache = length;
    }
    using vmmgraph::engine::Phase;
    input.phase = prefill && decode ? Phase::mixed : prefill ? Phase::prefill : Phase::decode;
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
