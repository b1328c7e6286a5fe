// An engine that sleeps: the decoder of examples/xllm_executor with its weights in one region and its KV cache in another, and its graphs
// captured once.
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
    // Loads the weights, makes the cache and captures the graphs. `name` begins the tags, so that engines of one device sleep apart.
    // vmmgraph::torch::install() was called before.
    Engine(const vmmgraph::Device& device, const ModelArgs& args, const std::string& name);

    // Begins with the first requests of a fixed series.
    void restart();
    // A step of all running sequences, on torch's current stream: their next tokens.
    [[nodiscard]] std::vector<std::int64_t> step();

    // Gives the memory of weights, cache and graphs away, behind what the stream was given. No step until both have come back.
    vmmgraph::PauseReport sleep();
    // The weights as they were. They may be used, or replaced, while the cache is not there yet.
    vmmgraph::ResumeReport wake_weights(std::chrono::microseconds deadline);
    // The graphs' memory, and the cache, empty: the next step fills it again from the sequences' tokens, as after a preemption.
    vmmgraph::ResumeReport wake_cache(std::chrono::microseconds deadline);

    [[nodiscard]] std::uint64_t weight_bytes() const { return weights_.stats().live_bytes; }
    [[nodiscard]] std::uint64_t cache_bytes() const { return kv_.stats().live_bytes; }
    [[nodiscard]] std::uint64_t arena_bytes() const { return arena_->mapped_size(); }
    [[nodiscard]] std::size_t graphs() const noexcept { return graphs_; }
    // Steps that ran by graphs.
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
