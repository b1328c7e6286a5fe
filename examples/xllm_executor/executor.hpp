// An engine's graph executor, in the shape of xLLM's CudaGraphExecutorImpl: run() takes a step and the caches and returns hidden states.
// What such a class has of its own (buckets, persistent tensors, pools, a map of graphs, captures and their failures) is the library's here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <vmmgraph/engine.hpp>

#include "decoder.hpp"

namespace xllm_example {

// A step as the scheduler makes it, on the host. Sequences stand one behind another.
struct ForwardInput {
    std::vector<std::int32_t> token_ids;
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> new_cache_slots;
    // [sequences, blocks_of_sequence]
    std::vector<std::int32_t> block_tables;
    // New tokens and all tokens of each sequence.
    std::vector<std::int32_t> q_seq_lens;
    std::vector<std::int32_t> kv_seq_lens;
    // The same as attention kernels want it.
    std::vector<std::int32_t> paged_kv_indptr;
    std::vector<std::int32_t> paged_kv_indices;
    std::vector<std::int32_t> paged_kv_last_page_len;
    std::vector<float> temperatures;
    vmmgraph::engine::Phase phase = vmmgraph::engine::Phase::decode;

    [[nodiscard]] std::uint32_t tokens() const { return static_cast<std::uint32_t>(token_ids.size()); }
    [[nodiscard]] std::uint32_t sequences() const { return static_cast<std::uint32_t>(q_seq_lens.size()); }
};

// Valid until the next step.
struct ModelOutput {
    at::Tensor hidden_states;
    vmmgraph::engine::Ran ran;
};

struct Options {
    // Most sequences of a step, and most tokens of a step with a prefill in it that a graph runs.
    std::uint32_t max_seqs_per_batch = 64;
    std::uint32_t max_tokens_for_graph = 256;
    bool enable_graph = true;
    // Of the library's executor: most_graphs, most_bytes, capture.
    vmmgraph::engine::ExecutorOptions graph;
};

class CudaGraphExecutorImpl {
public:
    // `model` must outlive it. `arena` is null on a CPU.
    CudaGraphExecutorImpl(const Decoder& model, std::shared_ptr<vmmgraph::SharedVmmAllocator> arena, const Options& options);

    // Captures every shape; the graphs that are there.
    std::size_t warm_up(std::vector<KVCache>& kv_caches);
    ModelOutput run(const ForwardInput& input, std::vector<KVCache>& kv_caches, void* stream);

    [[nodiscard]] vmmgraph::engine::GraphExecutor& graphs() noexcept { return *executor_; }
    [[nodiscard]] vmmgraph::engine::GraphInputs& inputs() noexcept { return *inputs_; }
    // The step's shape and values for the library.
    [[nodiscard]] vmmgraph::engine::Step step_of(const ForwardInput& input) const;
    [[nodiscard]] std::vector<vmmgraph::engine::NamedValue> values_of(const ForwardInput& input) const;
    // The step without a graph.
    [[nodiscard]] at::Tensor eager(const ForwardInput& input, const std::vector<KVCache>& kv_caches) const;

private:
    void body(vmmgraph::engine::Recorder& recorder);

    const Decoder& model_;
    Options options_;
    std::vector<KVCache>* kv_caches_ = nullptr;
    std::unique_ptr<vmmgraph::engine::GraphInputs> inputs_;
    std::unique_ptr<vmmgraph::engine::GraphExecutor> executor_;
};

}  // namespace xllm_example
