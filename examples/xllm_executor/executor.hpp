// Graph executor with the signature of xLLM's CudaGraphExecutorImpl
// (core/runtime/cuda_graph_executor_impl.h). The library replaces the rest of such a class:
// buckets, persistent tensors, pools, captures and their failures.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <vmmgraph/engine.hpp>

#include "decoder.hpp"

namespace xllm_example {

// Bit of a variant: the step has given embeddings.
inline constexpr std::uint32_t with_embedding = 2;

// Valid until the next step.
struct ModelOutput {
    at::Tensor hidden_states;
    vmmgraph::engine::Ran ran;
};

struct Options {
    // Maximum sequences per step, and maximum tokens of a graph step with a prefill.
    std::uint32_t max_seqs_per_batch = 64;
    std::uint32_t max_tokens_for_graph = 256;
    bool enable_graph = true;
    // Options of the library's executor: most_graphs, most_bytes, on_failure, guard, capture.
    vmmgraph::engine::ExecutorOptions graph = default_graph();

    // Like xLLM's warm-up run before a capture.
    static vmmgraph::engine::ExecutorOptions default_graph() {
        vmmgraph::engine::ExecutorOptions options;
        options.eager_runs = 1;
        return options;
    }
};

class CudaGraphExecutorImpl {
public:
    // `model` must outlive the executor. `arena` is null on a CPU.
    CudaGraphExecutorImpl(const Decoder& model, std::shared_ptr<vmmgraph::SharedVmmAllocator> arena,
                          const Options& options);

    std::size_t warm_up(std::vector<KVCache>& kv_caches);
    ModelOutput run(const at::Tensor& tokens, const at::Tensor& positions,
                    std::vector<KVCache>& kv_caches, const ModelInputParams& params);

    [[nodiscard]] vmmgraph::engine::GraphExecutor& graphs() noexcept { return *executor_; }
    [[nodiscard]] vmmgraph::engine::GraphInputs& inputs() noexcept { return *inputs_; }
    [[nodiscard]] vmmgraph::engine::Step step_of(const at::Tensor& tokens,
                                                 const ModelInputParams& params) const;
    [[nodiscard]] std::vector<vmmgraph::engine::NamedValue> values_of(
        const at::Tensor& tokens, const at::Tensor& positions,
        const ModelInputParams& params) const;
    [[nodiscard]] at::Tensor eager(const at::Tensor& tokens, const at::Tensor& positions,
                                   const std::vector<KVCache>& kv_caches,
                                   const ModelInputParams& params) const;

private:
    void body(vmmgraph::engine::Recorder& recorder);
    void plan();

    const Decoder& model_;
    Options options_;
    std::vector<KVCache>* kv_caches_ = nullptr;
    // Plan of the running step, read by attention between pieces.
    std::shared_ptr<PlanInfo> plan_info_ = std::make_shared<PlanInfo>();
    std::unique_ptr<vmmgraph::engine::GraphInputs> inputs_;
    std::unique_ptr<vmmgraph::engine::GraphExecutor> executor_;
};

}  // namespace xllm_example
