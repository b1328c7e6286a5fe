#include "executor.hpp"

#include <algorithm>

namespace xllm_example {
namespace {

using namespace vmmgraph::engine;

std::vector<Input> declare(const ModelArgs& args, std::uint32_t most_sequences) {
    const auto tokens = Extent::along(Axis::tokens);
    const auto batch = Extent::along(Axis::batch);
    const auto blocks = static_cast<std::uint32_t>(args.blocks_of_sequence);
    const auto dtype = c10::typeMetaToScalarType(args.options.dtype());
    return {
        Input::host(names::tokens, at::kInt, {tokens}),
        Input::host(names::positions, at::kInt, {tokens}),
        // Slot 0 and block 0 are nobody's.
        Input::host(names::new_cache_slots, at::kInt, {tokens}),
        Input::host(names::block_tables, at::kInt, {batch, Extent::fixed(blocks)}),
        Input::host(names::q_seq_lens, at::kInt, {batch}),
        Input::host(names::kv_seq_lens, at::kInt, {batch}, Pad::value(1)),
        Input::host(names::paged_kv_indptr, at::kInt, {Extent::along(Axis::batch, 1, 1)}, Pad::repeat_last()),
        Input::host(names::paged_kv_indices, at::kInt, {Extent::up_to(most_sequences * blocks)}),
        Input::host(names::paged_kv_last_page_len, at::kInt, {batch}, Pad::value(1)),
        Input::host("temperatures", at::kFloat, {batch}, Pad::value(1.0)),
        Input::output(names::hidden_states, dtype, {tokens, Extent::fixed(static_cast<std::uint32_t>(args.hidden))}),
    };
}

}  // namespace

CudaGraphExecutorImpl::CudaGraphExecutorImpl(const Decoder& model, std::shared_ptr<vmmgraph::SharedVmmAllocator> arena, const Options& options)
    : model_(model), options_(options) {
    auto graph = options.graph;
    std::vector<Key> buckets;
    if (options.enable_graph) {
        // Decode: a token for each sequence. With a prefill in it: tokens as the step has them, and room for every sequence, since the
        // pieces do not know how many there are.
        for (const auto size : bucket_sizes(VMMGRAPH_SIZES_XLLM, options.max_seqs_per_batch)) {
            graph.full.push_back(Key::of(size, size, uniform_decode));
        }
        for (std::uint32_t size = 16; size <= options.max_tokens_for_graph; size *= 2) {
            graph.piecewise.push_back(Key::of(size, options.max_seqs_per_batch));
        }
        buckets = graph.full;
        buckets.insert(buckets.end(), graph.piecewise.begin(), graph.piecewise.end());
    } else {
        graph.modes = {{{Mode::eager, Mode::eager}, {Mode::eager, Mode::eager}, {Mode::eager, Mode::eager}}};
        buckets = {Key::of(1, 1)};
    }
    inputs_ = std::make_unique<GraphInputs>(declare(model.args(), options.max_seqs_per_batch), buckets,
                                                         InputsOptions{model.args().options.device(), 512});
    executor_ = std::make_unique<GraphExecutor>(std::move(arena), *inputs_, [this](Recorder& recorder) { body(recorder); }, graph);
}

void CudaGraphExecutorImpl::body(Recorder& recorder) {
    const auto attention = [&](const at::Tensor& q, const KVCache& cache, const at::Tensor& out) {
        if (recorder.mode() == Mode::full) {
            model_.attend_decode(q, cache, inputs_->block_tables(), inputs_->kv_seq_lens(), out);
            return;
        }
        recorder.eager({q, out}, [this, cache](const Step& step, at::TensorList tensors) {
            // A warm-up step has no sequences.
            if (const auto* const input = static_cast<const ForwardInput*>(step.params)) {
                model_.attend_ragged(tensors[0], cache, inputs_->block_tables(), input->q_seq_lens, input->kv_seq_lens, tensors[1]);
            }
        });
    };
    const auto hidden = model_.forward({inputs_->tokens(), inputs_->positions(), inputs_->new_cache_slots()}, *kv_caches_, attention);
    inputs_->hidden_states().copy_(hidden);
}

Step CudaGraphExecutorImpl::step_of(const ForwardInput& input) const {
    const bool decode = input.phase == Phase::decode;
    return {Key::of(input.tokens(), input.sequences(), decode ? uniform_decode : 0), input.phase, true, &input};
}

std::vector<NamedValue> CudaGraphExecutorImpl::values_of(const ForwardInput& input) const {
    const auto blocks = static_cast<std::uint32_t>(model_.args().blocks_of_sequence);
    return {{names::tokens, input.token_ids},
            {names::positions, input.positions},
            {names::new_cache_slots, input.new_cache_slots},
            {names::block_tables, Value(input.block_tables.data(), {input.sequences(), blocks})},
            {names::q_seq_lens, input.q_seq_lens},
            {names::kv_seq_lens, input.kv_seq_lens},
            {names::paged_kv_indptr, input.paged_kv_indptr},
            {names::paged_kv_indices, input.paged_kv_indices},
            {names::paged_kv_last_page_len, input.paged_kv_last_page_len},
            {"temperatures", input.temperatures}};
}

at::Tensor CudaGraphExecutorImpl::eager(const ForwardInput& input, const std::vector<KVCache>& kv_caches) const {
    const auto up = [&](const std::vector<std::int32_t>& values) { return at::tensor(values, at::kInt).to(model_.args().options.device()); };
    const auto block_tables = up(input.block_tables).view({input.sequences(), model_.args().blocks_of_sequence});
    const auto kv_seq_lens = up(input.kv_seq_lens);
    return model_.forward({up(input.token_ids), up(input.positions), up(input.new_cache_slots)}, kv_caches,
                          [&](const at::Tensor& q, const KVCache& cache, const at::Tensor& out) {
                              if (input.phase == Phase::decode) {
                                  model_.attend_decode(q, cache, block_tables, kv_seq_lens, out);
                              } else {
                                  model_.attend_ragged(q, cache, block_tables, input.q_seq_lens, input.kv_seq_lens, out);
                              }
                          });
}

std::size_t CudaGraphExecutorImpl::warm_up(std::vector<KVCache>& kv_caches) {
    kv_caches_ = &kv_caches;
    return executor_->warm_up();
}

ModelOutput CudaGraphExecutorImpl::run(const ForwardInput& input, std::vector<KVCache>& kv_caches, void* stream) {
    kv_caches_ = &kv_caches;
    ModelOutput output;
    output.ran = executor_->run(step_of(input), values_of(input), [&] { output.hidden_states = eager(input, kv_caches); }, stream);
    if (output.ran.mode != Mode::eager) {
        output.hidden_states = inputs_->hidden_states(input.tokens());
    }
    return output;
}

}  // namespace xllm_example
