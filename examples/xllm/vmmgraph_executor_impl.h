#pragma once

#include <memory>
#include <vector>
#include <vmmgraph/engine.hpp>

#include "core/framework/kv_cache/kv_cache.h"
#include "core/framework/model/causal_lm.h"
#include "core/framework/model/model_input_params.h"
#include "core/kernels/cuda/attention_runner.h"
#include "core/layers/common/attention_metadata.h"
#include "executor_impl.h"
#include "executor_impl_factory.h"
#include "options.h"

namespace xllm::runtime::cuda {

// Runs decodes with full graphs and, if enable_prefill_piecewise_graph is set,
// prefills with piecewise graphs. All other steps run eagerly.
class VmmGraphExecutorImpl : public ExecutorImpl {
 public:
  VmmGraphExecutorImpl(CausalLM* model,
                       const ModelArgs& args,
                       const torch::Device& device,
                       const runtime::Options& options);

  ForwardInput prepare_inputs(Batch& batch) override;

  // Graph outputs are valid until the next step.
  ModelOutput run(const torch::Tensor& tokens,
                  const torch::Tensor& positions,
                  std::vector<KVCache>& kv_caches,
                  const ModelInputParams& params) override;

  size_t get_graph_memory_usage_bytes() const;
  const vmmgraph::engine::GraphExecutor& graphs() const { return *executor_; }

 private:
  vmmgraph::engine::Step step_of(const torch::Tensor& tokens,
                                 const torch::Tensor& positions,
                                 const ModelInputParams& params) const;
  std::vector<vmmgraph::engine::NamedValue> values_of(
      const torch::Tensor& tokens,
      const torch::Tensor& positions,
      const ModelInputParams& params) const;
  // Computes attention metadata and plan of a step from its padded inputs.
  // Called before every capture and replay, never inside a capture.
  void plan(const vmmgraph::engine::Step& step);
  // Runs the model on the inputs' buffers: the body recorded by a graph.
  void body(vmmgraph::engine::Recorder& recorder);

  CausalLM* model_;
  ModelArgs args_;
  torch::Device device_;
  runtime::Options options_;
  bool has_linear_state_ = false;
  // [0, 1, 2, ...]: a decode has one query token per sequence.
  torch::Tensor decode_qo_indptr_;

  // The running step.
  const ModelInputParams* params_ = nullptr;
  std::vector<KVCache>* kv_caches_ = nullptr;
  std::shared_ptr<layer::AttentionMetadata> metadata_;
  ::xllm::kernel::cuda::AttentionReplayParams replay_params_;

  std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_;
  std::unique_ptr<vmmgraph::engine::GraphInputs> inputs_;
  std::unique_ptr<vmmgraph::engine::GraphExecutor> executor_;
};
REGISTER_EXECUTOR("vmmgraph", VmmGraphExecutorImpl);

}  // namespace xllm::runtime::cuda
