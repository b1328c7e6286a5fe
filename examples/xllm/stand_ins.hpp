// Stand-ins for the xLLM declarations used in this folder, written for this
// test. Members have xLLM's names and meanings (xLLM-AI/xllm at 3906f5a9). The
// test implements the engine's functions.
#pragma once

#include <ATen/cuda/MemPool.h>
#include <c10/util/Logging.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// Getter and setter of one property.
#define XLLM_STAND_IN_PROPERTY(T, name, value)            \
  T name##_ = value;                                      \
  [[nodiscard]] const T& name() const { return name##_; } \
  auto& name(T given) {                                   \
    name##_ = std::move(given);                           \
    return *this;                                         \
  }

// With a semicolon, as in xLLM.
#define COUNTER_INC(name) ++::xllm::name;

namespace tvm::ffi {
template <class T>
using Array = std::vector<T>;
}  // namespace tvm::ffi
namespace ffi = tvm::ffi;

namespace xllm {

inline std::int64_t num_model_execution_total_eager = 0;

struct ModelArgs {
  XLLM_STAND_IN_PROPERTY(std::string, dtype, "double")
  XLLM_STAND_IN_PROPERTY(std::int64_t, hidden_size, 8)
  XLLM_STAND_IN_PROPERTY(std::int64_t, max_position_embeddings, 32)
  XLLM_STAND_IN_PROPERTY(std::int64_t, head_dim, 8)
  XLLM_STAND_IN_PROPERTY(std::int64_t, n_heads, 1)
  XLLM_STAND_IN_PROPERTY(std::optional<std::int64_t>, n_kv_heads, std::nullopt)
  XLLM_STAND_IN_PROPERTY(std::int32_t, sliding_window, -1)
  XLLM_STAND_IN_PROPERTY(bool, enable_mla, false)
  XLLM_STAND_IN_PROPERTY(std::vector<std::string>, layer_types, {})
};

namespace runtime {
struct Options {
  XLLM_STAND_IN_PROPERTY(std::int32_t, block_size, 4)
  XLLM_STAND_IN_PROPERTY(std::int32_t, max_seqs_per_batch, 8)
  XLLM_STAND_IN_PROPERTY(std::int32_t, max_tokens_per_batch, 128)
  XLLM_STAND_IN_PROPERTY(std::int64_t, num_decoding_tokens, 1)
  XLLM_STAND_IN_PROPERTY(std::int32_t, world_size, 1)
  XLLM_STAND_IN_PROPERTY(std::int32_t, dp_size, 1)
  XLLM_STAND_IN_PROPERTY(std::int32_t, cp_size, 1)
  XLLM_STAND_IN_PROPERTY(bool, enable_graph_aux_hidden_states, false)
};
}  // namespace runtime

struct ExecutionConfig {
  static ExecutionConfig& get_instance() {
    static ExecutionConfig instance;
    return instance;
  }
  XLLM_STAND_IN_PROPERTY(bool, enable_graph, true)
  XLLM_STAND_IN_PROPERTY(bool, enable_graph_mode_decode_no_padding, false)
  XLLM_STAND_IN_PROPERTY(bool, enable_prefill_piecewise_graph, false)
  XLLM_STAND_IN_PROPERTY(std::int32_t, max_tokens_for_graph_mode, 2048)
};

struct BatchForwardType {
  enum Value : std::int32_t {
    PREFILL = 0,
    CHUNKED_PREFILL = 1,
    DECODE = 2,
    MIXED = 3,
    EMPTY = 4
  };
  BatchForwardType(Value value = EMPTY) : value(value) {}  // NOLINT
  [[nodiscard]] bool is_prefill() const { return value == PREFILL; }
  [[nodiscard]] bool is_chunked_prefill() const {
    return value == CHUNKED_PREFILL;
  }
  [[nodiscard]] bool is_decode() const { return value == DECODE; }
  [[nodiscard]] bool is_mixed() const { return value == MIXED; }
  Value value;
};

namespace layer {

struct PlanInfo {
  std::int32_t layer_id = -1;
  ffi::Array<std::int64_t> plan_info;
  std::string uri;
};

struct AttentionMetadata {
  torch::Tensor q_cu_seq_lens, kv_cu_seq_lens, kv_seq_lens, block_table,
      slot_mapping;
  std::int64_t max_query_len = 0, max_seq_len = 0;
  bool is_prefill = false, is_chunked_prefill = false, is_dummy = false,
       is_causal = true;
  torch::Tensor paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len;
  std::optional<torch::Tensor> qo_indptr;
  std::shared_ptr<PlanInfo> plan_info;
  bool enable_cuda_graph = false;
};

}  // namespace layer

struct ModelInputParams {
  struct {
    BatchForwardType batch_forward_type;
    std::int32_t num_sequences = 0, kv_max_seq_len = 0, q_max_seq_len = 0;
  } meta;
  struct {
    // Empty if the scheduler filled only the device's tensors.
    struct {
      std::vector<std::int32_t> q_seq_lens, kv_seq_lens;
    } host;
    // Lengths are cumulative on CUDA, from 0.
    struct {
      torch::Tensor q_seq_lens, kv_seq_lens, new_cache_slots, block_tables;
      torch::Tensor paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len;
    } device;
  } attention;
  struct {
    mutable torch::Tensor input_embedding;
    std::vector<std::int32_t> linear_state_ids;
    torch::Tensor linear_state_indices;
  } embedding;
  struct {
    std::vector<std::int32_t> dp_global_token_nums, dp_is_decode;
  } parallel;
  std::shared_ptr<layer::AttentionMetadata> attn_metadata;
  [[nodiscard]] bool has_llmrec_params() const { return false; }
};

inline bool is_rec_multi_round_mode() { return false; }

namespace layer {

struct AttentionMetadataBuilder {
  // As on CUDA: a step without sequences becomes one with a token in slot 0.
  static AttentionMetadata build(
      const ModelInputParams& params,
      bool enable_mla,
      const std::optional<torch::Tensor>& attn_mask = {},
      const std::optional<torch::Device>& device = std::nullopt);
};

namespace flashinfer {
void update_prefill_plan_info(std::shared_ptr<PlanInfo> plan_info,
                              const std::string& backend,
                              const AttentionMetadata& attn_meta,
                              c10::ScalarType query_dtype,
                              c10::ScalarType key_dtype,
                              c10::ScalarType output_dtype,
                              std::int32_t head_dim_qk,
                              std::int32_t head_dim_vo,
                              std::int32_t num_qo_heads,
                              std::int32_t num_kv_heads,
                              bool enable_cuda_graph);
void update_decode_plan_info(std::shared_ptr<PlanInfo> plan_info,
                             const std::string& backend,
                             const AttentionMetadata& attn_meta,
                             c10::ScalarType query_dtype,
                             c10::ScalarType key_dtype,
                             c10::ScalarType output_dtype,
                             std::int32_t head_dim_qk,
                             std::int32_t head_dim_vo,
                             std::int32_t num_qo_heads,
                             std::int32_t num_kv_heads,
                             std::int32_t block_size,
                             std::int32_t window_size_left,
                             bool enable_cuda_graph,
                             bool use_tensor_core);
}  // namespace flashinfer
}  // namespace layer

namespace kernel::cuda {

struct AttentionReplayParams {
  ffi::Array<std::int64_t> plan_info;
  torch::Tensor q_cu_seq_lens, kv_cu_seq_lens;
  std::uint32_t actual_num_tokens = 0;
};

std::string determine_attention_backend(std::int64_t pos_encoding_mode,
                                        bool use_fp16_qk_reduction,
                                        bool use_custom_mask);
bool should_use_tensor_core(torch::ScalarType kv_cache_dtype,
                            std::int64_t num_attention_heads,
                            std::int64_t num_kv_heads);
void batch_prefill(const std::string& uri,
                   ffi::Array<std::int64_t> plan_info,
                   torch::Tensor float_workspace_buffer,
                   torch::Tensor int_workspace_buffer,
                   torch::Tensor page_locked_int_workspace_buffer,
                   torch::Tensor query,
                   torch::Tensor key,
                   torch::Tensor value,
                   torch::Tensor q_cu_seq_lens,
                   torch::Tensor kv_cu_seq_lens,
                   std::int64_t window_left,
                   double sm_scale,
                   torch::Tensor output,
                   std::optional<torch::Tensor>& output_lse);
void batch_prefill_with_optional_piecewise_capture(
    const std::string& uri,
    ffi::Array<std::int64_t> plan_info,
    torch::Tensor float_workspace_buffer,
    torch::Tensor int_workspace_buffer,
    torch::Tensor page_locked_int_workspace_buffer,
    torch::Tensor query,
    torch::Tensor key,
    torch::Tensor value,
    torch::Tensor q_cu_seq_lens,
    torch::Tensor kv_cu_seq_lens,
    std::int64_t window_left,
    double sm_scale,
    torch::Tensor output,
    std::optional<torch::Tensor>& output_lse);

}  // namespace kernel::cuda

namespace cuda {
struct DeviceCaptureLock {
  static DeviceCaptureLock& get_instance() {
    static DeviceCaptureLock instance;
    return instance;
  }
  std::shared_mutex& get_write_lock(c10::DeviceIndex index) {
    return locks[index];
  }
  std::shared_mutex& get_read_lock(c10::DeviceIndex index) {
    return locks[index];
  }
  std::map<c10::DeviceIndex, std::shared_mutex> locks;
};
}  // namespace cuda

namespace util {
inline torch::ScalarType parse_dtype(const std::string& dtype,
                                     const std::optional<torch::Device>&) {
  return dtype == "double" ? torch::kDouble : torch::kBFloat16;
}
}  // namespace util

class KVCache {
 public:
  KVCache(torch::Tensor k, torch::Tensor v)
      : k_(std::move(k)), v_(std::move(v)) {}
  [[nodiscard]] torch::Tensor get_k_cache() const { return k_; }
  [[nodiscard]] torch::Tensor get_v_cache() const { return v_; }
  [[nodiscard]] bool empty() const { return !k_.defined(); }

 private:
  torch::Tensor k_, v_;
};

struct ModelOutput {
  torch::Tensor hidden_states, residual, aux_hidden_states;
  ModelOutput() = default;
  explicit ModelOutput(const torch::Tensor& hidden_states)
      : hidden_states(hidden_states) {}
  ModelOutput(torch::Tensor hidden_states,
              torch::Tensor residual,
              torch::Tensor aux_hidden_states)
      : hidden_states(std::move(hidden_states)),
        residual(std::move(residual)),
        aux_hidden_states(std::move(aux_hidden_states)) {}
};

class CausalLM {
 public:
  virtual ~CausalLM() = default;
  virtual ModelOutput forward(const torch::Tensor& tokens,
                              const torch::Tensor& positions,
                              std::vector<KVCache>& kv_caches,
                              const ModelInputParams& parameters) = 0;
};

struct ForwardInput {};
struct Batch {
  ForwardInput prepare_forward_input(std::int64_t,
                                     std::int32_t,
                                     const ModelArgs&,
                                     std::int32_t) {
    return {};
  }
};

class ExecutorImpl {
 public:
  virtual ~ExecutorImpl() = default;
  virtual ForwardInput prepare_inputs(Batch& batch) = 0;
  virtual ModelOutput run(const torch::Tensor& tokens,
                          const torch::Tensor& positions,
                          std::vector<KVCache>& kv_caches,
                          const ModelInputParams& params) = 0;
};

struct ExecutorImplFactory {
  using Creator =
      std::function<std::unique_ptr<ExecutorImpl>(CausalLM*,
                                                  const ModelArgs&,
                                                  const torch::Device&,
                                                  const runtime::Options&)>;
  static ExecutorImplFactory& get_instance() {
    static ExecutorImplFactory instance;
    return instance;
  }
  bool register_creator(const std::string& name, Creator creator) {
    return creators.emplace(name, std::move(creator)).second;
  }
  std::map<std::string, Creator> creators;
};
#define REGISTER_EXECUTOR(backend, class_type)                                 \
  namespace {                                                                  \
  [[maybe_unused]] const bool class_type##_registered =                        \
      ExecutorImplFactory::get_instance().register_creator(                    \
          backend,                                                             \
          [](CausalLM* model,                                                  \
             const ModelArgs& args,                                            \
             const torch::Device& device,                                      \
             const runtime::Options& options)                                  \
              -> std::unique_ptr<ExecutorImpl> {                               \
            return std::make_unique<class_type>(model, args, device, options); \
          });                                                                  \
  }

// xLLM's own piecewise captures of prefills, unused here.
namespace kernel::cuda {
struct AttentionRunner {
  void run_capture(const std::string&,
                   ffi::Array<std::int64_t>,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   torch::Tensor,
                   std::int64_t,
                   double,
                   torch::Tensor,
                   std::optional<torch::Tensor>&,
                   std::uint32_t) {}
};
}  // namespace kernel::cuda
namespace runtime::cuda {
struct GlobalCaptureInstance {
  static GlobalCaptureInstance& get_instance() {
    static GlobalCaptureInstance instance;
    return instance;
  }
  [[nodiscard]] bool is_capturing() const { return false; }
  void register_attention_runner(kernel::cuda::AttentionRunner&&) {}
};
}  // namespace runtime::cuda

// The part of xLLM's executor that makes pools.
namespace runtime::cuda {
using TorchMemPool = at::cuda::MemPool;
class CudaGraphExecutorImpl {
  struct VmmPoolState;
  VmmPoolState& get_or_create_vmm_pool_state(std::uint32_t physical_pool_id);
  TorchMemPool* get_or_create_vmm_mempool(std::uint32_t physical_pool_id,
                                          std::uint32_t shape_id);

  torch::Device device_ = torch::kCUDA;
  std::mutex vmm_mutex_;
  std::unordered_map<std::uint32_t, std::unique_ptr<VmmPoolState>> vmm_pools_;
};
}  // namespace runtime::cuda

}  // namespace xllm
