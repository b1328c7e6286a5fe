// Decoder with layers of realistic size, and its executor, for measurements.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>

#include "../../examples/xllm_executor/executor.hpp"
#include "../torch/median.hpp"
#include "devices.hpp"

namespace engine_tests {

using xllm_example::CudaGraphExecutorImpl;
using xllm_example::Decoder;
using xllm_example::ForwardInput;
using xllm_example::ModelArgs;

inline double microseconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
        .count();
}

class Measure : public testing::Test {
protected:
    static constexpr std::int32_t context = 200;

    void SetUp() override {
        if (!has_gpu()) {
            GTEST_SKIP() << "needs a GPU";
        }
        vmmgraph::torch::install();
        build(8);
    }

    void build(std::int64_t layers) {
        executor.reset();
        ModelArgs args;
        args.layers = layers;
        args.hidden = 2048;
        args.heads = 16;
        args.kv_heads = 4;
        args.head_dim = 128;
        args.intermediate = 5504;
        args.blocks = 1100;
        args.blocks_of_sequence = 16;
        args.options = on_device(at::kBFloat16);
        model = std::make_unique<Decoder>(args);
        caches = model->make_caches();
        arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
        executor = std::make_unique<CudaGraphExecutorImpl>(*model, arena, xllm_example::Options{});
        guard.reset_stream(
            c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream()), 0));
        executor->warm_up(caches);
        wait();
    }

    // Prints and returns median microseconds; the first two are checked.
    std::vector<double> host_times(std::int64_t layers);

    [[nodiscard]] ForwardInput decode(std::int32_t batch) const {
        std::vector<std::int32_t> tokens, slots, tables, indptr{0}, indices, last_page_len,
            q_seq_lens{0}, kv_seq_lens{0};
        const auto& args = model->args();
        for (std::int32_t i = 0; i < batch; ++i) {
            tokens.push_back(7 * i + 1);
            const auto first = 1 + i * static_cast<std::int32_t>(args.blocks_of_sequence);
            for (std::int32_t block = 0; block < args.blocks_of_sequence; ++block) {
                tables.push_back(first + block);
                if (block * args.block_size < context) {
                    indices.push_back(first + block);
                }
            }
            slots.push_back(static_cast<std::int32_t>((first + (context - 1) / args.block_size) *
                                                          args.block_size +
                                                      (context - 1) % args.block_size));
            q_seq_lens.push_back(i + 1);
            kv_seq_lens.push_back((i + 1) * context);
            indptr.push_back(static_cast<std::int32_t>(indices.size()));
            last_page_len.push_back((context - 1) % static_cast<std::int32_t>(args.block_size) + 1);
        }
        const auto ints = [](const std::vector<std::int32_t>& of) {
            return at::tensor(of, at::kInt);
        };
        ForwardInput input;
        input.token_ids = ints(tokens);
        input.positions = at::full({batch}, context - 1, at::kInt);
        auto& params = input.input_params;
        params.meta.num_sequences = batch;
        params.attention.host = {q_seq_lens, kv_seq_lens};
        params.attention.device = {ints(kv_seq_lens), ints(slots),   ints(tables).view({batch, -1}),
                                   ints(indptr),      ints(indices), ints(last_page_len)};
        params.embedding.linear_state_indices = ints(tokens);
        return input;
    }

    [[nodiscard]] std::vector<NamedValue> values_of(const ForwardInput& input) const {
        return executor->values_of(input.token_ids, input.positions, input.input_params);
    }
    xllm_example::ModelOutput run(const ForwardInput& input) {
        return executor->run(input.token_ids, input.positions, caches, input.input_params);
    }

    void forward() {
        auto& inputs = executor->inputs();
        xllm_example::ModelInputParams params;
        params.attn_metadata = std::make_shared<xllm_example::AttentionMetadata>(
            xllm_example::AttentionMetadata{true, inputs.new_cache_slots(), inputs.block_tables(),
                                            inputs.kv_seq_lens(), nullptr});
        inputs.hidden_states().copy_(
            model->forward(inputs.tokens(), inputs.positions(), caches, params));
    }

    // In a private pool of torch.
    void capture_privately(at::cuda::CUDAGraph& graph, const ForwardInput& input,
                           const Key& bucket) {
        executor->inputs().update(bucket, values_of(input), stream());
        wait();
        const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool(true));
        forward();
        wait();
        graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
        forward();
        graph.capture_end();
        wait();
    }

    // Like the executor's own graphs.
    vmmgraph::torch::CapturedGraph capture_in_arena(const Key& bucket) {
        executor->inputs().select(bucket);
        const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool(true));
        forward();
        wait();
        auto graph = vmmgraph::torch::capture(*arena, c10::cuda::getCurrentCUDAStream().stream(),
                                              [&] { forward(); });
        wait();
        return graph;
    }

    // Device milliseconds per step.
    template <class F>
    static double step_time(int steps, F&& step) {
        cudaEvent_t begin = nullptr;
        cudaEvent_t end = nullptr;
        EXPECT_EQ(cudaEventCreate(&begin), cudaSuccess);
        EXPECT_EQ(cudaEventCreate(&end), cudaSuccess);
        EXPECT_EQ(cudaEventRecord(begin, static_cast<cudaStream_t>(stream())), cudaSuccess);
        for (int i = 0; i < steps; ++i) {
            step();
        }
        EXPECT_EQ(cudaEventRecord(end, static_cast<cudaStream_t>(stream())), cudaSuccess);
        EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
        float milliseconds = 0;
        EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
        static_cast<void>(cudaEventDestroy(begin));
        static_cast<void>(cudaEventDestroy(end));
        return milliseconds / steps;
    }

    std::unique_ptr<Decoder> model;
    std::vector<xllm_example::KVCache> caches;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::unique_ptr<CudaGraphExecutorImpl> executor;
    c10::cuda::OptionalCUDAStreamGuard guard;
};

}  // namespace engine_tests
