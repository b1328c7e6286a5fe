#include "attention_runner.h"

#include <utility>
#include <vmmgraph/engine.hpp>

#include "core/framework/config/execution_config.h"
#include "cuda_ops_api.h"
#include "global_capture_instance.h"

namespace xllm::kernel::cuda {

void batch_prefill_with_optional_piecewise_capture(
    const std::string& uri,
    ffi::Array<int64_t> plan_info,
    torch::Tensor float_workspace_buffer,
    torch::Tensor int_workspace_buffer,
    torch::Tensor page_locked_int_workspace_buffer,
    torch::Tensor query,
    torch::Tensor key,
    torch::Tensor value,
    torch::Tensor q_cu_seq_lens,
    torch::Tensor kv_cu_seq_lens,
    int64_t window_left,
    double sm_scale,
    torch::Tensor output,
    std::optional<torch::Tensor>& output_lse) {
  using vmmgraph::engine::Recorder;
  if (auto* const recorder = Recorder::current()) {
    // Called at every replay, with tensors at the same addresses and the
    // executor's parameters of the step.
    recorder->eager(
        {query, key, value, output},
        [=](const vmmgraph::engine::Step& step, at::TensorList tensors) {
          const auto& params =
              *static_cast<const AttentionReplayParams*>(step.params);
          const auto rows = [&](const torch::Tensor& of) {
            return of.slice(0, 0, params.actual_num_tokens);
          };
          std::optional<torch::Tensor> no_lse;
          batch_prefill(uri,
                        params.plan_info,
                        float_workspace_buffer,
                        int_workspace_buffer,
                        page_locked_int_workspace_buffer,
                        rows(tensors[0]),
                        rows(tensors[1]),
                        rows(tensors[2]),
                        params.q_cu_seq_lens,
                        params.kv_cu_seq_lens,
                        window_left,
                        sm_scale,
                        rows(tensors[3]),
                        no_lse);
        });
    return;
  }
  // xLLM's own executor.
  auto& capture = ::xllm::runtime::cuda::GlobalCaptureInstance::get_instance();
  if (::xllm::ExecutionConfig::get_instance().enable_graph() &&
      ::xllm::ExecutionConfig::get_instance()
          .enable_prefill_piecewise_graph() &&
      capture.is_capturing()) {
    AttentionRunner runner;
    runner.run_capture(uri,
                       plan_info,
                       float_workspace_buffer,
                       int_workspace_buffer,
                       page_locked_int_workspace_buffer,
                       query,
                       key,
                       value,
                       q_cu_seq_lens,
                       kv_cu_seq_lens,
                       window_left,
                       sm_scale,
                       output,
                       output_lse,
                       static_cast<uint32_t>(query.size(0)));
    capture.register_attention_runner(std::move(runner));
    return;
  }
  batch_prefill(uri,
                plan_info,
                float_workspace_buffer,
                int_workspace_buffer,
                page_locked_int_workspace_buffer,
                query,
                key,
                value,
                q_cu_seq_lens,
                kv_cu_seq_lens,
                window_left,
                sm_scale,
                output,
                output_lse);
}

}  // namespace xllm::kernel::cuda
