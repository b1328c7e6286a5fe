#include "scheduler.hpp"

#include <utility>

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
    // In about every second step, up to four requests join: a hundred steps up to a full batch,
    // then a hundred steps up to a small one.
    const std::size_t room = step_++ / 100 % 2 == 0 ? most_ : most_ / 8;
    const bool joins = running_.empty() || pick(0, 1) == 0;
    for (int i = 0; i < 4 && joins && running_.size() < room; ++i) {
        join();
    }
    std::vector<Sequence*> sequences;
    bool prefill = false;
    for (auto& sequence : running_) {
        sequences.push_back(&sequence);
        prefill |= sequence.in_cache == 0;
    }
    auto [input, rows] = make_batch(args_, sequences);
    rows_ = std::move(rows);
    if (args_.multimodal && prefill && pick(0, 1) == 0) {
        // Every element depends on a token.
        input.input_params.embedding.input_embedding =
            (at::outer(input.token_ids, at::arange(1, args_.hidden + 1, at::kInt)) % 17 / 8.0 - 1)
                .to(c10::typeMetaToScalarType(args_.options.dtype()));
    }
    return std::move(input);
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
