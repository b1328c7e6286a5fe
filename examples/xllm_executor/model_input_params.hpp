// A step as xLLM's executors get it: the parts of its ModelInputParams (core/framework/model/model_input_params.h) that decide about graphs
// and fill their inputs, under its names. Tensors are on the model's device or on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <vmmgraph/engine.hpp>

namespace xllm_example {

// What attention kernels want to know on the host, of every sequence that has tokens: where its queries begin and end, and its keys.
// Cumulative, with a row more than there are sequences.
struct PlanInfo {
    std::vector<std::int32_t> q_cu_seq_lens;
    std::vector<std::int32_t> kv_cu_seq_lens;
};

// What a layer's attention reads.
struct AttentionMetadata {
    // A token for each sequence, over block tables: of fixed shapes, so a graph can hold it.
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
            // [num_sequences, blocks of the longest one]
            at::Tensor block_tables;
            at::Tensor paged_kv_indptr;
            at::Tensor paged_kv_indices;
            at::Tensor paged_kv_last_page_len;
        } device;
    } attention;
    struct {
        // [tokens, hidden], for steps with images in them; else undefined.
        at::Tensor input_embedding;
        // [num_sequences], for models with linear attention; else undefined.
        at::Tensor linear_state_indices;
    } embedding;
    struct {
        // Of all data-parallel ranks, this one's among them; empty if there are no others.
        std::vector<std::int32_t> dp_global_token_nums;
        std::vector<std::int32_t> dp_is_decode;
    } parallel;
    // As the executor made it.
    std::shared_ptr<AttentionMetadata> attn_metadata;

    [[nodiscard]] ModelInputParams to(c10::Device device) const;
};

// What a scheduler makes of a batch.
struct ForwardInput {
    // [tokens]
    at::Tensor token_ids;
    // [tokens], or [3, tokens] of a multi-modal model.
    at::Tensor positions;
    ModelInputParams input_params;

    [[nodiscard]] ForwardInput to(c10::Device device) const;
};

}  // namespace xllm_example
