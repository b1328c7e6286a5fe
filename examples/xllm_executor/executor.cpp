#include "executor.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include <c10/cuda/CUDAStream.h>

namespace xllm_example {
namespace {

using namespace vmmgraph::engine;

std::vector<Input> declare(const ModelArgs& args, std::uint32_t most_sequences) {
    const auto tokens = Extent::along(Axis::tokens);
    const auto batch = Extent::along(Axis::batch);
    const auto one_more = Extent::along(Axis::batch, 1, 1);
    const auto blocks = static_cast<std::uint32_t>(args.blocks_of_sequence);
    const auto hidden = Extent::fixed(static_cast<std::uint32_t>(args.hidden));
    const auto dtype = c10::typeMetaToScalarType(args.options.dtype());
    const auto positions =
        args.multimodal ? std::vector{Extent::fixed(3), tokens} : std::vector{tokens};
    std::vector<Input> inputs{
        Input::host(names::tokens, at::kInt, {tokens}),
        Input::host(names::positions, at::kInt, positions),
        // Slot 0 and block 0 are reserved for padding.
        Input::host(names::new_cache_slots, at::kInt, {tokens}, Pad::zero()),
        Input::host(names::block_tables, at::kInt, {batch, Extent::fixed(blocks)}),
        // Cumulative: a padded sequence has no tokens.
        Input::host(names::q_seq_lens, at::kInt, {one_more}, Pad::repeat_last()),
        Input::host(names::kv_seq_lens, at::kInt, {one_more}, Pad::repeat_last()),
        Input::host(names::paged_kv_indptr, at::kInt, {one_more}, Pad::repeat_last()),
        Input::host(names::paged_kv_indices, at::kInt, {Extent::up_to(most_sequences * blocks)}),
        Input::host(names::paged_kv_last_page_len, at::kInt, {batch}, Pad::value(1)),
        Input::host("linear_state_indices", at::kInt, {batch}),
        Input::output(names::hidden_states, dtype, {tokens, hidden}),
    };
    if (args.multimodal) {
        inputs.push_back(Input::device(names::embeddings, dtype, {tokens, hidden}));
    }
    return inputs;
}

std::vector<std::int32_t> elements(const at::Tensor& of) {
    return {of.const_data_ptr<std::int32_t>(), of.const_data_ptr<std::int32_t>() + of.numel()};
}

}  // namespace

CudaGraphExecutorImpl::CudaGraphExecutorImpl(const Decoder& model,
                                             std::shared_ptr<vmmgraph::SharedVmmAllocator> arena,
                                             const Options& options)
    : model_(model), options_(options) {
    auto graph = options.graph;
    std::vector<Key> buckets;
    if (options.enable_graph) {
        // Decode: one token per sequence. With a prefill: the step's tokens, and room for the
        // maximum number of sequences, since the pieces do not know the number.
        for (const auto size : bucket_sizes(VMMGRAPH_SIZES_XLLM, options.max_seqs_per_batch)) {
            graph.full.push_back(Key::of(size, size, uniform_decode));
        }
        for (std::uint32_t size = 16; size <= options.max_tokens_for_graph; size *= 2) {
            graph.piecewise.push_back(Key::of(size, options.max_seqs_per_batch));
            if (model.args().multimodal) {
                graph.piecewise.push_back(
                    Key::of(size, options.max_seqs_per_batch, with_embedding));
            }
        }
        buckets = graph.full;
        buckets.insert(buckets.end(), graph.piecewise.begin(), graph.piecewise.end());
    } else {
        graph.modes = {
            {{Mode::eager, Mode::eager}, {Mode::eager, Mode::eager}, {Mode::eager, Mode::eager}}};
        buckets = {Key::of(1, 1)};
    }
    graph.before_launch = [this](const Key& bucket, const Step&) {
        if ((bucket.variant & uniform_decode) == 0) {
            plan();
        }
    };
    inputs_ =
        std::make_unique<GraphInputs>(declare(model.args(), options.max_seqs_per_batch), buckets,
                                      InputsOptions{model.args().options.device(), 512});
    executor_ = std::make_unique<GraphExecutor>(
        std::move(arena), *inputs_, [this](Recorder& recorder) { body(recorder); }, graph);
}

void CudaGraphExecutorImpl::plan() {
    *plan_info_ = {elements(inputs_->host(names::q_seq_lens)),
                   elements(inputs_->host(names::kv_seq_lens))};
}

void CudaGraphExecutorImpl::body(Recorder& recorder) {
    ModelInputParams params;
    params.attn_metadata = std::make_shared<AttentionMetadata>(
        AttentionMetadata{recorder.mode() == Mode::full, inputs_->new_cache_slots(),
                          inputs_->block_tables(), inputs_->kv_seq_lens(), plan_info_});
    if ((recorder.bucket().variant & with_embedding) != 0) {
        params.embedding.input_embedding = inputs_->embeddings();
    }
    inputs_->hidden_states().copy_(
        model_.forward(inputs_->tokens(), inputs_->positions(), *kv_caches_, params));
}

Step CudaGraphExecutorImpl::step_of(const at::Tensor& tokens,
                                    const ModelInputParams& params) const {
    auto phase = params.meta.batch_forward_type;
    auto n = static_cast<std::uint32_t>(tokens.size(0));
    auto sequences = static_cast<std::uint32_t>(params.meta.num_sequences);
    if (const auto& of = params.parallel; of.dp_global_token_nums.size() > 1) {
        // Collectives need equal steps on every rank: all run the graph of the largest rank, and
        // decode only if all decode.
        n = static_cast<std::uint32_t>(
            *std::max_element(of.dp_global_token_nums.begin(), of.dp_global_token_nums.end()));
        const bool decode = std::all_of(of.dp_is_decode.begin(), of.dp_is_decode.end(),
                                        [](std::int32_t does) { return does != 0; });
        phase = decode ? Phase::decode : Phase::mixed;
        sequences = decode ? n : sequences;
    }
    const auto variant = (phase == Phase::decode ? uniform_decode : 0) |
                         (params.embedding.input_embedding.defined() ? with_embedding : 0);
    return {Key::of(n, sequences, variant), phase, true, &params};
}

std::vector<NamedValue> CudaGraphExecutorImpl::values_of(const at::Tensor& tokens,
                                                         const at::Tensor& positions,
                                                         const ModelInputParams& params) const {
    const auto& on_device = params.attention.device;
    // Called for every step: a braced list would copy each tensor once more.
    std::vector<NamedValue> values;
    if (tokens.size(0) == 0) {
        return values;
    }
    values.reserve(11);
    const auto add = [&](std::string_view name, Value value) {
        values.push_back({name, std::move(value)});
    };
    add(names::tokens, tokens);
    add(names::positions, positions);
    add(names::new_cache_slots, on_device.new_cache_slots);
    add(names::block_tables, on_device.block_tables);
    // From the host, where the plan is made.
    add(names::q_seq_lens, params.attention.host.q_seq_lens);
    add(names::kv_seq_lens, params.attention.host.kv_seq_lens);
    add(names::paged_kv_indptr, on_device.paged_kv_indptr);
    add(names::paged_kv_indices, on_device.paged_kv_indices);
    add(names::paged_kv_last_page_len, on_device.paged_kv_last_page_len);
    if (params.embedding.linear_state_indices.defined()) {
        add("linear_state_indices", params.embedding.linear_state_indices);
    }
    if (params.embedding.input_embedding.defined()) {
        add(names::embeddings, params.embedding.input_embedding);
    }
    return values;
}

at::Tensor CudaGraphExecutorImpl::eager(const at::Tensor& tokens, const at::Tensor& positions,
                                        const std::vector<KVCache>& kv_caches,
                                        const ModelInputParams& given) const {
    const auto device = model_.args().options.device();
    auto params = given.to(device);
    const auto& lengths = params.attention.host;
    params.attn_metadata = std::make_shared<AttentionMetadata>(AttentionMetadata{
        params.meta.batch_forward_type == Phase::decode, params.attention.device.new_cache_slots,
        params.attention.device.block_tables, params.attention.device.kv_seq_lens,
        std::make_shared<PlanInfo>(PlanInfo{lengths.q_seq_lens, lengths.kv_seq_lens})});
    return model_.forward(tokens.to(device), positions.to(device), kv_caches, params);
}

std::size_t CudaGraphExecutorImpl::warm_up(std::vector<KVCache>& kv_caches) {
    kv_caches_ = &kv_caches;
    return executor_->warm_up();
}

ModelOutput CudaGraphExecutorImpl::run(const at::Tensor& tokens, const at::Tensor& positions,
                                       std::vector<KVCache>& kv_caches,
                                       const ModelInputParams& params) {
    kv_caches_ = &kv_caches;
    const auto device = model_.args().options.device();
    void* const stream =
        device.is_cuda() ? c10::cuda::getCurrentCUDAStream(device.index()).stream() : nullptr;
    ModelOutput output;
    output.ran = executor_->run(
        step_of(tokens, params), values_of(tokens, positions, params),
        [&] { output.hidden_states = eager(tokens, positions, kv_caches, params); }, stream);
    if (output.ran.mode != Mode::eager) {
        output.hidden_states = inputs_->hidden_states(tokens.size(0));
    }
    return output;
}

}  // namespace xllm_example
