// Continuous batching over the decoder: sequences join with a prompt, get a token each step and leave.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "batch.hpp"
#include "executor.hpp"

namespace xllm_example {

// What joins when, the same for every seed; so two engines that run the same schedule differ by their tokens only.
class Scheduler {
public:
    Scheduler(const ModelArgs& args, std::uint32_t most_sequences, unsigned seed) : args_(args), most_(most_sequences), random_(seed) {
        for (std::int64_t block = args.blocks - 1; block > 0; --block) {
            free_.push_back(static_cast<std::int32_t>(block));
        }
    }

    // The next step, on the host. Its tokens are the last ones given to take().
    [[nodiscard]] ForwardInput next();
    // The rows of the step whose tokens are asked for: the last of each sequence.
    [[nodiscard]] const std::vector<std::int64_t>& rows() const noexcept { return rows_; }
    // The sequences' next tokens, in the step's order; those that are done leave.
    void take(const std::vector<std::int64_t>& tokens);
    // The cache has lost its contents: the next step computes those of all running sequences again.
    void lose_cache() noexcept {
        for (auto& sequence : running_) {
            sequence.in_cache = 0;
        }
    }
    // All tokens of the step's n-th sequence so far.
    [[nodiscard]] const std::vector<std::int32_t>& tokens_of(std::size_t n) const { return running_[n].tokens; }
    [[nodiscard]] std::size_t joined() const noexcept { return joined_; }
    [[nodiscard]] std::size_t left() const noexcept { return left_; }

private:
    void join();
    std::int64_t pick(std::int64_t from, std::int64_t to) {
        return from + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(to - from + 1));
    }

    ModelArgs args_;
    std::uint32_t most_;
    std::mt19937_64 random_;
    std::vector<std::int32_t> free_;
    std::vector<Sequence> running_;
    std::vector<std::int64_t> rows_;
    std::size_t step_ = 0;
    std::size_t joined_ = 0;
    std::size_t left_ = 0;
};

}  // namespace xllm_example
