// A step as passed to xLLM's executors: the members of ModelInputParams
// (core/framework/model/model_input_params.h) that select graphs and fill their inputs. Tensors are
// on the model's device or on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <vmmgraph/engine.hpp>

namespace xllm_example {

// Host data for attention kernels: begin and end of each sequence's queries and keys. Cumulative,
// with one more row than sequences.
struct PlanInfo {
    std::vector<std::int32_t> q_cu_seq_lens;
    std::vector<std::int32_t> kv_cu_seq_lens;
};

struct AttentionMetadata {
    // One token per sequence, over block tables. The shapes are fixed, so a graph can contain it.
    bool is_decode = false;
    at::Tensor slot_mapping;
    at::Tensor block_table;
    at::Tensor kv_cu_seq_lens;
    std::shared_ptr<PlanInfo> plan_info;
};

struct ModelInputParams {
    struct {
        vmmgraph::engine::Phase batch_forward_type = vmmgraph::engine::Phase::decode;
        std::int32_t num_sequences = 0;
    } meta;
    struct {
        // Cumulative, [num_sequences + 1].
        struct {
            std::vector<std::int32_t> q_seq_lens;
            std::vector<std::int32_t> kv_seq_lens;
        } host;
        struct {
            at::Tensor kv_seq_lens;
            at::Tensor new_cache_slots;
            at::Tensor block_tables;
            at::Tensor paged_kv_indptr;
            at::Tensor paged_kv_indices;
            at::Tensor paged_kv_last_page_len;
        } device;
    } attention;
    struct {
        // [tokens, hidden] for steps with images; otherwise undefined.
        at::Tensor input_embedding;
        // [num_sequences] for models with linear attention; otherwise undefined.
        at::Tensor linear_state_indices;
    } embedding;
    struct {
        // By data-parallel rank, including this one; empty with a single rank.
        std::vector<std::int32_t> dp_global_token_nums;
        std::vector<std::int32_t> dp_is_decode;
    } parallel;
    std::shared_ptr<AttentionMetadata> attn_metadata;

    [[nodiscard]] ModelInputParams to(c10::Device device) const;
};

struct ForwardInput {
    at::Tensor token_ids;
    // [tokens], or [3, tokens] for a multi-modal model.
    at::Tensor positions;
    ModelInputParams input_params;

    [[nodiscard]] ForwardInput to(c10::Device device) const;
};

}  // namespace xllm_example
