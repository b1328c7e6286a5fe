#include "model_input_params.hpp"

namespace xllm_example {

ModelInputParams ModelInputParams::to(c10::Device device) const {
    auto moved = *this;
    auto& of = moved.attention.device;
    for (auto* const tensor :
         {&of.kv_seq_lens, &of.new_cache_slots, &of.block_tables, &of.paged_kv_indptr,
          &of.paged_kv_indices, &of.paged_kv_last_page_len, &moved.embedding.input_embedding,
          &moved.embedding.linear_state_indices}) {
        if (tensor->defined()) {
            *tensor = tensor->to(device);
        }
    }
    return moved;
}

ForwardInput ForwardInput::to(c10::Device device) const {
    return {token_ids.to(device), positions.to(device), input_params.to(device)};
}

}  // namespace xllm_example
