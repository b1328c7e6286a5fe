// A step over sequences: what a scheduler knows of them, as the executor wants it.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace xllm_example {

struct Sequence {
    std::uint64_t id = 0;
    std::vector<std::int32_t> tokens;
    // Tokens whose keys and values are in the cache.
    std::int64_t in_cache = 0;
    // How many tokens it is to have, the prompt's among them.
    std::int64_t wanted = 0;
    // Its blocks in order; below 0: not on the device.
    std::vector<std::int32_t> blocks;
};

// A step on the host that computes what is not in the cache yet; afterwards it is.
struct Batch {
    ForwardInput input;
    // The rows of the step whose tokens are asked for: the last of each sequence.
    std::vector<std::int64_t> rows;
};
[[nodiscard]] Batch make_batch(const ModelArgs& args, const std::vector<Sequence*>& sequences);

}  // namespace xllm_example
