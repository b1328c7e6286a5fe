// Continuous batching over the decoder: sequences join with a prompt, get one token per step, and
// leave.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "batch.hpp"
#include "executor.hpp"

namespace xllm_example {

// Equal seeds give equal arrivals, so two engines with one schedule can only differ in tokens.
class Scheduler {
public:
    Scheduler(const ModelArgs& args, std::uint32_t most_sequences, unsigned seed)
        : args_(args), most_(most_sequences), random_(seed) {
        for (std::int64_t block = args.blocks - 1; block > 0; --block) {
            free_.push_back(static_cast<std::int32_t>(block));
        }
    }

    // Returns the next step, on the host. Its tokens are from the last take().
    [[nodiscard]] ForwardInput next();
    [[nodiscard]] const std::vector<std::int64_t>& rows() const noexcept { return rows_; }
    // Takes the sequences' next tokens in the step's order; finished sequences leave.
    void take(const std::vector<std::int64_t>& tokens);
    // Marks the cache as lost: the next step recomputes it for all running sequences.
    void lose_cache() noexcept {
        for (auto& sequence : running_) {
            sequence.in_cache = 0;
        }
    }
    [[nodiscard]] const std::vector<std::int32_t>& tokens_of(std::size_t n) const {
        return running_[n].tokens;
    }
    [[nodiscard]] std::size_t joined() const noexcept { return joined_; }
    [[nodiscard]] std::size_t left() const noexcept { return left_; }

private:
    void join();
    std::int64_t pick(std::int64_t from, std::int64_t to) {
        return from +
               static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(to - from + 1));
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
