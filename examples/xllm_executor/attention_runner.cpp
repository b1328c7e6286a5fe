// A layer's attention. What xLLM has in core/kernels/cuda/attention_runner.cpp: the same call, recorded or run.
#include "decoder.hpp"

namespace xllm_example {

using vmmgraph::engine::Recorder;
using vmmgraph::engine::Step;

void Decoder::attention(const at::Tensor& q, const KVCache& cache, const AttentionMetadata& metadata, const at::Tensor& out) const {
    if (metadata.is_decode) {
        // A sequence that is not there has no key, and a softmax over none is no number.
        attend_decode(q, cache, metadata.block_table, at::diff(metadata.kv_cu_seq_lens).clamp_min(1), out);
        return;
    }
    if (auto* const recorder = Recorder::current()) {
        // Between two graphs, at every replay, by the plan of that step.
        recorder->eager({q, out}, [this, cache, metadata](const Step&, at::TensorList tensors) {
            attend_ragged(tensors[0], cache, metadata.block_table, *metadata.plan_info, tensors[1]);
        });
        return;
    }
    attend_ragged(q, cache, metadata.block_table, *metadata.plan_info, out);
}

}  // namespace xllm_example
