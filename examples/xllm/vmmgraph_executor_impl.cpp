#include "vmmgraph_executor_impl.h"

#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "core/common/metrics.h"
#include "core/framework/config/execution_config.h"
#include "core/layers/common/attention_metadata_builder.h"
#include "core/layers/cuda/flashinfer_planinfo.h"
#include "core/platform/cuda/device_capture_lock.h"
#include "core/util/rec_model_utils.h"
#include "core/util/utils.h"
#include "kernels/cuda/utils.h"

namespace xllm::runtime::cuda {

namespace {

using namespace vmmgraph::engine;

// Bit of a variant: the step has given embeddings.
constexpr uint32_t kWithEmbedding = 2;
constexpr const char* kLinearStateIndices = "linear_state_indices";

// Returns the arena of a device, shared by all executors. A target model and
// its draft model never run at the same time, so their graphs share pages.
// VmmGraph orders the replays of an arena on all streams.
std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_of(
    const torch::Device& device) {
  if (!device.is_cuda()) {
    return nullptr;  // a test on a CPU
  }
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, std::weak_ptr<vmmgraph::SharedVmmAllocator>>
      arenas;
  std::lock_guard<std::mutex> lock(mutex);
  auto& known = arenas[device.index()];
  auto arena = known.lock();
  if (!arena) {
    vmmgraph::torch::install();
    arena = std::make_shared<vmmgraph::SharedVmmAllocator>(device.index());
    known = arena;
  }
  return arena;
}

std::vector<uint32_t> decode_sizes(uint32_t max_seqs) {
  if (!ExecutionConfig::get_instance().enable_graph_mode_decode_no_padding()) {
    return bucket_sizes(VMMGRAPH_SIZES_XLLM, max_seqs);
  }
  std::vector<uint32_t> sizes(max_seqs);
  for (uint32_t i = 0; i < max_seqs; ++i) {
    sizes[i] = i + 1;
  }
  return sizes;
}

}  // namespace

VmmGraphExecutorImpl::VmmGraphExecutorImpl(CausalLM* model,
                                           const ModelArgs& args,
                                           const torch::Device& device,
                                           const runtime::Options& options)
    : model_(model),
      args_(args),
      device_(device),
      options_(options),
      arena_(arena_of(device)) {
  const auto& config = ExecutionConfig::get_instance();
  const auto& layers = args_.layer_types();
  has_linear_state_ =
      std::find(layers.begin(), layers.end(), "linear_attention") !=
      layers.end();

  ExecutorOptions graph;
  std::vector<Key> buckets;
  const auto add = [&](std::vector<Key>& keys,
                       uint32_t size,
                       uint32_t batch,
                       uint32_t variant) {
    for (const uint32_t with : {0u, kWithEmbedding}) {
      keys.push_back(Key::of(size, batch, variant | with));
      buckets.push_back(keys.back());
    }
  };
  uint32_t max_seqs = 0;
  for (const uint32_t size : decode_sizes(options_.max_seqs_per_batch())) {
    add(graph.full, size, size, uniform_decode);
    max_seqs = std::max(max_seqs, size);
  }
  // Chunked and mixed steps are neither decodes nor prefills: always eager.
  const auto mode_of = [&](Phase phase) -> auto& {
    return graph.modes[static_cast<size_t>(phase)];
  };
  mode_of(Phase::prefill) = {Mode::eager, Mode::eager};
  mode_of(Phase::mixed) = {Mode::eager, Mode::eager};
  if (config.enable_prefill_piecewise_graph()) {
    mode_of(Phase::prefill) = {Mode::piecewise, Mode::eager};
    const int64_t most_tokens = std::min<int64_t>(
        std::max<int64_t>(config.max_tokens_for_graph_mode(), max_seqs),
        options_.max_tokens_per_batch());
    for (const uint32_t size : bucket_sizes(VMMGRAPH_SIZES_XLLM, most_tokens)) {
      add(graph.piecewise, size, max_seqs, 0);
    }
  }
  graph.on_failure = OnFailure::throws;
  graph.eager_runs = 1;
  graph.before_launch = [this](const Key&, const Step& step) { plan(step); };
  graph.guard = [this](Work work) -> std::shared_ptr<void> {
    auto& locks = ::xllm::cuda::DeviceCaptureLock::get_instance();
    if (work == Work::capture) {
      return std::make_shared<std::unique_lock<std::shared_mutex>>(
          locks.get_write_lock(device_.index()));
    }
    return std::make_shared<std::shared_lock<std::shared_mutex>>(
        locks.get_read_lock(device_.index()));
  };

  const uint32_t block_table_len =
      (args_.max_position_embeddings() + options_.block_size() - 1) /
          options_.block_size() +
      1;
  const auto per_token = Extent::along(Axis::tokens);
  const auto per_sequence = Extent::along(Axis::batch);
  const auto cumulative = Extent::along(Axis::batch, 1, 1);
  const auto dtype = util::parse_dtype(args_.dtype(), device_);
  // Values may be on the device or on the host.
  std::vector<Input> inputs{
      Input::host(names::tokens, torch::kInt, {per_token}),
      Input::host(names::positions, torch::kInt, {per_token}),
      // Kernels skip negative slots; slot 0 belongs to a sequence.
      Input::host(
          names::new_cache_slots, torch::kInt, {per_token}, Pad::value(-1)),
      Input::host(names::block_tables,
                  torch::kInt,
                  {per_sequence, Extent::fixed(block_table_len)}),
      // Cumulative on CUDA: a padded sequence has no tokens.
      Input::host(
          names::q_seq_lens, torch::kInt, {cumulative}, Pad::repeat_last()),
      Input::host(
          names::kv_seq_lens, torch::kInt, {cumulative}, Pad::repeat_last()),
      Input::host(names::paged_kv_indptr,
                  torch::kInt,
                  {cumulative},
                  Pad::repeat_last()),
      Input::host(names::paged_kv_indices,
                  torch::kInt,
                  {Extent::up_to(max_seqs * block_table_len)}),
      Input::host(names::paged_kv_last_page_len,
                  torch::kInt,
                  {per_sequence},
                  Pad::value(1)),
      // Row 0 is kPaddingLinearStateId, used by no sequence.
      Input::host(kLinearStateIndices, torch::kInt, {per_sequence}),
      Input::host(names::embeddings,
                  dtype,
                  {per_token,
                   Extent::fixed(static_cast<uint32_t>(args_.hidden_size()))}),
      // Shaped by the first step.
      Input::output(names::hidden_states),
      Input::output(names::aux_hidden_states)};
  decode_qo_indptr_ =
      torch::arange(static_cast<int64_t>(max_seqs) + 1,
                    torch::TensorOptions().dtype(torch::kInt).device(device_));
  InputsOptions where;
  where.device = device_;
  inputs_ = std::make_unique<GraphInputs>(std::move(inputs), buckets, where);
  executor_ = std::make_unique<GraphExecutor>(
      arena_, *inputs_, [this](Recorder& recorder) { body(recorder); }, graph);
}

ForwardInput VmmGraphExecutorImpl::prepare_inputs(Batch& batch) {
  return batch.prepare_forward_input(
      options_.num_decoding_tokens(), 0, args_, options_.cp_size());
}

Step VmmGraphExecutorImpl::step_of(const torch::Tensor& tokens,
                                   const torch::Tensor& positions,
                                   const ModelInputParams& params) const {
  const auto& type = params.meta.batch_forward_type;
  const auto& ranks = params.parallel;
  const auto& embedding = params.embedding.input_embedding;
  const bool several_ranks = ranks.dp_global_token_nums.size() > 1;
  // A data-parallel rank without requests has one fake token and no sequence.
  const bool is_dummy =
      params.meta.num_sequences == 0 || params.meta.q_max_seq_len == 0;
  bool decode = type.is_decode();
  int64_t n_tokens = tokens.size(0);
  if (several_ranks) {
    // All ranks run the graph of the largest rank, and decode only if all do.
    decode = std::all_of(ranks.dp_is_decode.begin(),
                         ranks.dp_is_decode.end(),
                         [](int32_t does) { return does != 0; });
    n_tokens =
        std::max<int64_t>(n_tokens,
                          *std::max_element(ranks.dp_global_token_nums.begin(),
                                            ranks.dp_global_token_nums.end()));
  }
  Step step;
  // Parameters of the attention between the pieces of a prefill.
  step.params = &replay_params_;
  step.capturable =
      !is_rec_multi_round_mode() && !params.has_llmrec_params() &&
      positions.dim() == 1 &&
      params.meta.kv_max_seq_len <= args_.max_position_embeddings() &&
      (!embedding.defined() || embedding.size(1) == args_.hidden_size());
  const uint32_t variant = embedding.defined() ? kWithEmbedding : 0;
  if (decode) {
    step.phase = Phase::decode;
    step.key = Key::of(n_tokens, n_tokens, uniform_decode | variant);
    step.capturable = step.capturable &&
                      (is_dummy || tokens.size(0) == params.meta.num_sequences);
  } else if (type.is_prefill() && !several_ranks) {
    step.phase = Phase::prefill;
    step.key = Key::of(n_tokens, params.meta.num_sequences, variant);
    // Linear attention in the pieces depends on the step's lengths.
    step.capturable = step.capturable && !is_dummy && !has_linear_state_;
  } else {
    step.phase = Phase::mixed;
    step.key = Key::of(n_tokens, params.meta.num_sequences, variant);
  }
  return step;
}

std::vector<NamedValue> VmmGraphExecutorImpl::values_of(
    const torch::Tensor& tokens,
    const torch::Tensor& positions,
    const ModelInputParams& params) const {
  const auto& device = params.attention.device;
  const auto& embedding = params.embedding;
  std::vector<NamedValue> values;
  const auto add = [&](std::string_view name, const torch::Tensor& value) {
    values.push_back({name, Value(value)});
  };
  if (tokens.size(0) > 0) {
    add(names::tokens, tokens.to(torch::kInt));
    add(names::positions, positions.to(torch::kInt));
  }
  if (params.meta.num_sequences == 0 || params.meta.q_max_seq_len == 0) {
    return values;  // everything else is padding: no slot is written
  }
  // Look-up is fastest in the order of declaration.
  add(names::new_cache_slots, device.new_cache_slots);
  if (!params.meta.batch_forward_type.is_prefill() || args_.enable_mla()) {
    add(names::block_tables, device.block_tables);
  }
  if (params.meta.batch_forward_type.is_prefill()) {
    add(names::q_seq_lens, device.q_seq_lens);
  }
  add(names::kv_seq_lens, device.kv_seq_lens);
  if (params.meta.batch_forward_type.is_decode()) {
    add(names::paged_kv_indptr, device.paged_kv_indptr);
    add(names::paged_kv_indices, device.paged_kv_indices);
    add(names::paged_kv_last_page_len, device.paged_kv_last_page_len);
  }
  if (!embedding.linear_state_ids.empty()) {
    add(kLinearStateIndices,
        embedding.linear_state_indices.defined()
            ? embedding.linear_state_indices
            : torch::tensor(embedding.linear_state_ids, torch::kInt)
                  .to(device_));
  }
  if (embedding.input_embedding.defined()) {
    add(names::embeddings, embedding.input_embedding);
  }
  return values;
}

ModelOutput VmmGraphExecutorImpl::run(const torch::Tensor& tokens,
                                      const torch::Tensor& positions,
                                      std::vector<KVCache>& kv_caches,
                                      const ModelInputParams& params) {
  params_ = &params;
  kv_caches_ = &kv_caches;
  replay_params_ = {};
  replay_params_.actual_num_tokens = tokens.size(0);
  void* const stream =
      device_.is_cuda()
          ? c10::cuda::getCurrentCUDAStream(device_.index()).stream()
          : nullptr;
  const Step step = step_of(tokens, positions, params);
  ModelOutput output;
  const Ran ran = executor_->run(
      step,
      step.capturable ? values_of(tokens, positions, params)
                      : std::vector<NamedValue>{},
      [&] { output = model_->forward(tokens, positions, kv_caches, params); },
      stream);
  if (ran.mode == Mode::eager) {
    COUNTER_INC(num_model_execution_total_eager);
    return output;
  }
  const int64_t n_tokens = tokens.size(0);
  if (options_.enable_graph_aux_hidden_states() &&
      inputs_->is_set(names::aux_hidden_states)) {
    return ModelOutput(inputs_->hidden_states(n_tokens),
                       torch::Tensor(),
                       inputs_->aux_hidden_states(n_tokens));
  }
  return ModelOutput(inputs_->hidden_states(n_tokens));
}

void VmmGraphExecutorImpl::plan(const Step& step) {
  const auto first = std::find_if(
      kv_caches_->begin(), kv_caches_->end(), [](const KVCache& cache) {
        return !cache.empty() && cache.get_k_cache().defined() &&
               cache.get_k_cache().numel() > 0;
      });
  CHECK(first != kv_caches_->end()) << "no layer has a full-attention KV cache";
  const auto dtype = first->get_k_cache().scalar_type();
  const int64_t tp_size =
      std::max(options_.world_size() / std::max(options_.dp_size(), 1), 1);
  const int32_t n_heads = args_.n_heads() / tp_size;
  const int32_t n_kv_heads = std::max<int64_t>(
      args_.n_kv_heads().value_or(args_.n_heads()) / tp_size, 1);
  const int32_t head_dim = args_.head_dim();

  metadata_ = std::make_shared<layer::AttentionMetadata>(
      layer::AttentionMetadataBuilder::build(
          *params_, args_.enable_mla(), std::nullopt, device_));
  auto& metadata = *metadata_;
  metadata.enable_cuda_graph = true;
  metadata.is_dummy = false;
  metadata.slot_mapping = inputs_->new_cache_slots();
  metadata.plan_info->layer_id = 0;
  if (step.phase == Phase::decode) {
    const int64_t batch = inputs_->bucket()[Axis::batch];
    metadata.is_prefill = metadata.is_chunked_prefill = false;
    metadata.is_causal = false;
    // These values are fixed in the graph.
    metadata.max_query_len = 1;
    metadata.max_seq_len = args_.max_position_embeddings();
    metadata.q_cu_seq_lens = decode_qo_indptr_.slice(0, 0, batch + 1);
    metadata.qo_indptr = metadata.q_cu_seq_lens;
    metadata.kv_cu_seq_lens = inputs_->kv_seq_lens();
    metadata.kv_seq_lens = torch::diff(metadata.kv_cu_seq_lens);
    metadata.block_table = inputs_->block_tables();
    metadata.paged_kv_indptr = inputs_->paged_kv_indptr();
    metadata.paged_kv_indices = inputs_->paged_kv_indices();
    metadata.paged_kv_last_page_len = inputs_->paged_kv_last_page_len();
    layer::flashinfer::update_decode_plan_info(
        metadata.plan_info,
        /*backend=*/"fa2",
        metadata,
        dtype,
        dtype,
        dtype,
        head_dim,
        head_dim,
        n_heads,
        n_kv_heads,
        options_.block_size(),
        /*window_size_left=*/args_.sliding_window() - 1,
        /*enable_cuda_graph=*/true,
        ::xllm::kernel::cuda::should_use_tensor_core(
            dtype, n_heads, n_kv_heads));
  } else {
    // The step's number of sequences, which determines the plan's workspace.
    metadata.q_cu_seq_lens = inputs_->actual(names::q_seq_lens);
    metadata.kv_cu_seq_lens = inputs_->actual(names::kv_seq_lens);
    metadata.kv_seq_lens = torch::diff(metadata.kv_cu_seq_lens);
    if (args_.enable_mla()) {
      metadata.block_table = inputs_->block_tables();
    }
    layer::flashinfer::update_prefill_plan_info(
        metadata.plan_info,
        ::xllm::kernel::cuda::determine_attention_backend(
            /*pos_encoding_mode=*/0,
            /*use_fp16_qk_reduction=*/false,
            /*use_custom_mask=*/false),
        metadata,
        dtype,
        dtype,
        dtype,
        head_dim,
        head_dim,
        n_heads,
        n_kv_heads,
        /*enable_cuda_graph=*/true);
  }
  replay_params_.plan_info = metadata.plan_info->plan_info;
  replay_params_.q_cu_seq_lens = metadata.q_cu_seq_lens;
  replay_params_.kv_cu_seq_lens = metadata.kv_cu_seq_lens;
}

void VmmGraphExecutorImpl::body(Recorder& recorder) {
  const bool decode = recorder.mode() == Mode::full;
  if (decode && !recorder.recording()) {
    return;  // a decode runs once: it updates recurrent states
  }
  ModelInputParams params = *params_;
  params.attn_metadata = metadata_;
  if ((recorder.bucket().variant & kWithEmbedding) != 0) {
    params.embedding.input_embedding = inputs_->embeddings();
  }
  if (has_linear_state_) {
    params.embedding.linear_state_ids.resize(recorder.bucket()[Axis::batch]);
    params.embedding.linear_state_indices = inputs_->get(kLinearStateIndices);
  }
  auto& token_nums = params.parallel.dp_global_token_nums;
  if (token_nums.size() > 1) {
    std::fill(token_nums.begin(),
              token_nums.end(),
              static_cast<int32_t>(recorder.bucket()[Axis::tokens]));
  }
  if (decode) {
    // Recorded, so every replay recomputes the lengths.
    metadata_->kv_seq_lens = torch::diff(metadata_->kv_cu_seq_lens);
  }
  const ModelOutput output = model_->forward(
      inputs_->tokens(), inputs_->positions(), *kv_caches_, params);
  inputs_->set(names::hidden_states, output.hidden_states);
  if (options_.enable_graph_aux_hidden_states() &&
      output.aux_hidden_states.defined()) {
    inputs_->set(names::aux_hidden_states, output.aux_hidden_states);
  }
}

size_t VmmGraphExecutorImpl::get_graph_memory_usage_bytes() const {
  return (arena_ ? arena_->mapped_size() : 0) + inputs_->arena_bytes();
}

}  // namespace xllm::runtime::cuda
