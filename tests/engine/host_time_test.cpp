// Host cost of a step and its parts. Each RESULT line is a row of the performance document.
#include <array>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include <cuda.h>

#include "measure.hpp"

namespace engine_tests {
namespace {

struct Way {
    std::string name;
    std::function<void()> timed;
    std::function<void()> before;
};

// Median microseconds of alternating calls after 100 warm-up calls, on an idle device.
std::vector<double> medians_of(const std::vector<Way>& ways, int rounds) {
    std::vector<std::vector<double>> times(ways.size());
    for (int round = 0; round < 100 + rounds; ++round) {
        for (std::size_t i = 0; i < ways.size(); ++i) {
            const auto& way = ways[i];
            if (way.before) {
                way.before();
            }
            wait();
            const auto start = std::chrono::steady_clock::now();
            way.timed();
            const auto time = microseconds_since(start);
            if (round >= 100) {
                times[i].push_back(time);
            }
        }
    }
    std::vector<double> medians;
    for (const auto& of_one : times) {
        medians.push_back(median(of_one));
    }
    return medians;
}

// Without the library: a persistent tensor and a copy per input.
struct Copies {
    std::vector<at::Tensor> pinned;
    std::vector<at::Tensor> pageable;
    std::vector<at::Tensor> persistent;

    explicit Copies(const ForwardInput& input) {
        const auto& of = input.input_params;
        const auto& on_device = of.attention.device;
        for (const auto& values :
             {input.token_ids, input.positions, on_device.new_cache_slots, on_device.block_tables,
              at::tensor(of.attention.host.q_seq_lens, at::kInt), on_device.kv_seq_lens,
              on_device.paged_kv_indptr, on_device.paged_kv_indices,
              on_device.paged_kv_last_page_len, of.embedding.linear_state_indices}) {
            pinned.push_back(values.flatten().pin_memory());
        }
        for (const auto& source : pinned) {
            persistent.push_back(at::zeros({2 * source.size(0)},
                                           source.options().device(device()).pinned_memory(false)));
            pageable.push_back(source.clone());
        }
    }

    void copy(const std::vector<at::Tensor>& from) {
        for (std::size_t i = 0; i < from.size(); ++i) {
            persistent[i].narrow(0, 0, from[i].size(0)).copy_(from[i], true);
        }
    }
};

// xLLM's way: one copy of packed values from pinned memory, and one kernel with a pointer per
// input.
class CopyAndKernel {
public:
    explicit CopyAndKernel(const Copies& copies) {
        const char* const text =
            ".version 7.0\n.target sm_50\n.address_size 64\n"
            ".visible .entry fill(.param .align 8 .b8 pointers[128], .param .u64 packed) { ret; "
            "}\n";
        CUmodule module = nullptr;
        EXPECT_EQ(entry<decltype(&cuModuleLoadData)>("cuModuleLoadData")(&module, text),
                  CUDA_SUCCESS);
        EXPECT_EQ(entry<decltype(&cuModuleGetFunction)>("cuModuleGetFunction")(&function_, module,
                                                                               "fill"),
                  CUDA_SUCCESS);
        pinned_ = at::cat(copies.pageable).pin_memory();
        packed_ = at::empty_like(pinned_, pinned_.options().device(device()).pinned_memory(false));
        for (std::size_t i = 0; i < copies.persistent.size(); ++i) {
            pointers_.at(i) = copies.persistent[i].data_ptr();
        }
    }

    void operator()(cudaStream_t on) {
        EXPECT_EQ(cudaMemcpyAsync(packed_.data_ptr(), pinned_.data_ptr(), pinned_.nbytes(),
                                  cudaMemcpyHostToDevice, on),
                  cudaSuccess);
        void* packed = packed_.data_ptr();
        std::array<void*, 2> arguments{pointers_.data(), &packed};
        EXPECT_EQ(launch_(function_, 1, 1, 1, 128, 1, 1, 0, on, arguments.data(), nullptr),
                  CUDA_SUCCESS);
    }

private:
    template <class Function>
    static Function entry(const char* name) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result),
                  cudaSuccess);
        return reinterpret_cast<Function>(found);
    }

    decltype(&cuLaunchKernel) launch_ = entry<decltype(&cuLaunchKernel)>("cuLaunchKernel");
    CUfunction function_ = nullptr;
    at::Tensor pinned_, packed_;
    std::array<void*, 16> pointers_{};
};

// "409 kernels, 8 memsets, 1 copy".
std::string nodes_of(cudaGraph_t graph) {
    std::size_t count = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
    std::vector<cudaGraphNode_t> nodes(count);
    EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
    std::map<int, std::size_t> kinds;
    for (const auto node : nodes) {
        cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
        ++kinds[type];
    }
    const auto kernels = std::exchange(kinds[cudaGraphNodeTypeKernel], 0);
    const auto memsets = std::exchange(kinds[cudaGraphNodeTypeMemset], 0);
    const auto copies = std::exchange(kinds[cudaGraphNodeTypeMemcpy], 0);
    return std::to_string(kernels) + " kernels, " + std::to_string(memsets) + " memsets, " +
           std::to_string(copies) + " copies of " + std::to_string(count) + " nodes";
}

}  // namespace

std::vector<double> Measure::host_times(std::int64_t layers) {
    const auto input = decode(64);
    const auto bucket = Key::of(64, 64, uniform_decode);
    auto& inputs = executor->inputs();
    auto& graphs = executor->graphs();
    at::cuda::CUDAGraph graph(true);
    capture_privately(graph, input, bucket);
    std::printf("RESULT host, %lld layers: a graph of %s\n", static_cast<long long>(layers),
                nodes_of(graph.raw_cuda_graph()).c_str());
    graph.instantiate();
    auto ours = capture_in_arena(bucket);
    Copies copies(input);
    CopyAndKernel copy_and_kernel(copies);
    std::unordered_map<std::uint32_t, at::cuda::CUDAGraph*> known{{64, &graph}};
    const auto step = executor->step_of(input.token_ids, input.input_params);
    const auto values = values_of(input);
    const std::function<void()> nothing = [] {};
    auto* const on = c10::cuda::getCurrentCUDAStream(0).stream();
    // Twice, so the next staging buffer is free.
    const auto twice = [&] {
        inputs.update(bucket, values, on), inputs.update(bucket, values, on);
    };
    const auto dispatched = [&] { twice(), graphs.prepare(step, values); };
    const std::vector<Way> ways{
        {"update, dispatch and replay", [&] { static_cast<void>(run(input)); }, {}},
        {"a copy an input from pinned memory, look-up and replay",
         [&] { copies.copy(copies.pinned), known.find(64)->second->replay(); },
         {}},
        {"a copy an input from pageable memory, look-up and replay",
         [&] { copies.copy(copies.pageable), known.find(64)->second->replay(); },
         {}},
        {"update alone", [&] { inputs.update(bucket, values_of(input), on); }, {}},
        {"replay alone, private pool", [&] { graph.replay(); }, {}},
        {"replay alone, ours", [&] { ours.replay(on); }, {}},
        {"one copy and one kernel, as xLLM fills its decode inputs",
         [&] { copy_and_kernel(on); },
         {}},
        {"part: values_of", [&] { static_cast<void>(values_of(input)); }, {}},
        {"part: prepare of the inputs", [&] { inputs.prepare(bucket, values); }, twice},
        {"part: commit of the inputs", [&] { inputs.commit(on); },
         [&] { twice(), inputs.prepare(bucket, values); }},
        {"part: prepare of the executor (dispatch, prepare of the inputs)",
         [&] { graphs.prepare(step, values); }, twice},
        {"part: launch of the executor (commit, replay)", [&] { graphs.launch(nothing, on); },
         dispatched},
    };
    const auto medians = medians_of(ways, 1000);
    for (std::size_t i = 0; i < ways.size(); ++i) {
        std::printf("RESULT host, %lld layers: %.2f us median for 10 inputs at batch 64: %s\n",
                    static_cast<long long>(layers), medians[i], ways[i].name.c_str());
    }
    return medians;
}

TEST_F(Measure, HostTimeOfAStep) {
    for (const std::int64_t layers : {8, 1}) {
        build(layers);
        const auto medians = host_times(layers);
        EXPECT_LE(medians[0], 15.0)
            << layers << " layers; a private pool's replay alone took " << medians[4];
        EXPECT_GE(medians[1], 3.0 * medians[0]) << layers << " layers";
        // Torch never destroys this stream, so steps record no marks.
        guard.reset_stream(c10::cuda::getStreamFromPool(true, 0));
        std::printf("RESULT host, %lld layers, on a stream of torch's own:\n",
                    static_cast<long long>(layers));
        const auto by_name = host_times(layers);
        EXPECT_LE(by_name[0], 15.0) << layers << " layers";
    }
}

}  // namespace engine_tests
