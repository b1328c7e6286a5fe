// An engine with a sleep mode: the decoder of examples/xllm_executor with its weights in one
// region, its KV cache in a second one, and its graphs captured once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <vmmgraph/torch_region.hpp>

#include "../xllm_executor/scheduler.hpp"

namespace sleep_example {

using xllm_example::ModelArgs;

class Engine {
public:
    // `name` is the prefix of the tags, so engines on one device sleep independently. Call
    // vmmgraph::torch::install() first.
    Engine(const vmmgraph::Device& device, const ModelArgs& args, const std::string& name);

    // Restarts with the first requests of a fixed series.
    void restart();
    // Runs one step of all running sequences on torch's current stream. Returns their next tokens.
    [[nodiscard]] std::vector<std::int64_t> step();

    // Frees the memory of weights, cache and graphs after the stream's current work. No step may
    // run until both are resumed.
    vmmgraph::PauseReport sleep();
    // Restores the weights, which may be used or replaced before the cache is resumed.
    vmmgraph::ResumeReport wake_weights(std::chrono::microseconds deadline);
    // Resumes the graphs' memory and the cache, which is empty and recomputed from the sequences'
    // tokens.
    vmmgraph::ResumeReport wake_cache(std::chrono::microseconds deadline);

    [[nodiscard]] std::uint64_t weight_bytes() const { return weights_.stats().live_bytes; }
    [[nodiscard]] std::uint64_t cache_bytes() const { return kv_.stats().live_bytes; }
    [[nodiscard]] std::uint64_t arena_bytes() const { return arena_->mapped_size(); }
    [[nodiscard]] std::size_t graphs() const noexcept { return graphs_; }
    [[nodiscard]] std::size_t by_graphs() const noexcept { return by_graphs_; }

private:
    const vmmgraph::Device& device_;
    std::string weights_tag_;
    std::string kv_tag_;
    vmmgraph::Region weights_;
    vmmgraph::Region kv_;
    xllm_example::Decoder model_;
    std::vector<xllm_example::KVCache> caches_;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_;
    xllm_example::CudaGraphExecutorImpl executor_;
    std::unique_ptr<xllm_example::Scheduler> scheduler_;
    std::size_t graphs_ = 0;
    std::size_t by_graphs_ = 0;
};

}  // namespace sleep_example
