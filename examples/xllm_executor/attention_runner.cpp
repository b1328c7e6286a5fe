// Attention of a layer, recorded or run. Counterpart of xLLM's
// core/kernels/cuda/attention_runner.cpp.
#include "decoder.hpp"

namespace xllm_example {

using vmmgraph::engine::Recorder;
using vmmgraph::engine::Step;

void Decoder::attention(const at::Tensor& q, const KVCache& cache,
                        const AttentionMetadata& metadata, const at::Tensor& out) const {
    if (metadata.is_decode) {
        // A padded sequence has no keys, and a softmax over nothing is NaN.
        attend_decode(q, cache, metadata.block_table,
                      at::diff(metadata.kv_cu_seq_lens).clamp_min(1), out);
        return;
    }
    if (auto* const recorder = Recorder::current()) {
        // Runs between two graphs at every replay, with the step's plan.
        recorder->eager({q, out}, [this, cache, metadata](const Step&, at::TensorList tensors) {
            attend_ragged(tensors[0], cache, metadata.block_table, *metadata.plan_info, tensors[1]);
        });
        return;
    }
    attend_ragged(q, cache, metadata.block_table, *metadata.plan_info, out);
}

}  // namespace xllm_example
