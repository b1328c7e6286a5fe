// Conversion of a scheduler's sequences to an executor's step.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace xllm_example {

struct Sequence {
    std::uint64_t id = 0;
    std::vector<std::int32_t> tokens;
    // Tokens with keys and values in the cache.
    std::int64_t in_cache = 0;
    // Final number of tokens, including the prompt.
    std::int64_t wanted = 0;
    // Blocks in order; negative: not on the device.
    std::vector<std::int32_t> blocks;
};

// A step, on the host, for computing all uncached tokens; marks the tokens as cached.
struct Batch {
    ForwardInput input;
    // Rows of the step with requested tokens: the last one of each sequence.
    std::vector<std::int64_t> rows;
};
[[nodiscard]] Batch make_batch(const ModelArgs& args, const std::vector<Sequence*>& sequences);

}  // namespace xllm_example
