// Fixture for real captures: a model, its captures, and replays checked against eager results.
// Needs a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>

#include "torchs_bytes.hpp"

namespace at::cuda {
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace torch_tests {

using vmmgraph::Retain;
using vmmgraph::SharedVmmAllocator;
using vmmgraph::torch::capture;
using vmmgraph::torch::CapturedGraph;
using vmmgraph::torch::CaptureOptions;
using vmmgraph::torch::Route;

inline constexpr std::size_t MiB = std::size_t{1} << 20;

inline at::TensorOptions half() {
    return at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA);
}

inline long setting(const char* name, long otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr || *text == '\0' ? otherwise : std::strtol(text, nullptr, 10);
}

// A stack of gated layers, wide enough for split-K kernels.
struct Model {
    std::vector<std::array<at::Tensor, 3>> layers;

    explicit Model(int depth = 4, std::int64_t width = 2048) {
        for (int i = 0; i < depth; ++i) {
            const auto make = [&](std::int64_t rows, std::int64_t columns) {
                return at::randn({rows, columns}, half()) * (1.0 / 64);
            };
            layers.push_back(
                {make(width, 3 * width), make(width, 3 * width), make(3 * width, width)});
        }
    }

    at::Tensor operator()(at::Tensor x) const {
        for (const auto& [gate, up, down] : layers) {
            x = x + at::mm(at::silu(at::mm(x, gate)) * at::mm(x, up), down);
            x = x / x.to(at::kFloat).pow(2).mean(-1, true).sqrt().to(at::kBFloat16);
        }
        return x;
    }
};

struct Shape {
    at::Tensor input;
    at::Tensor expected;
    at::Tensor output;
    CapturedGraph graph;
};

class Torch : public testing::Test {
protected:
    static void SetUpTestSuite() { at::manual_seed(1); }

    void SetUp() override {
        ASSERT_STREQ(vmmgraph::torch::built_for(), TORCH_VERSION);
        vmmgraph::torch::install();
        stream_ = c10::cuda::getStreamFromPool(true);
    }
    void TearDown() override {
        cudaDeviceSynchronize();
        vmmgraph::torch::uninstall();
        ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    }

    // Captures y = model(x) for each batch; outputs are the capture's own tensors.
    std::vector<Shape> shapes(SharedVmmAllocator& arena, const Model& model,
                              const std::vector<int>& batches, const CaptureOptions& options = {},
                              bool warm = false) {
        std::vector<Shape> shapes;
        for (const int batch : batches) {
            auto input = at::randn({batch, model.layers[0][0].size(0)}, half());
            at::Tensor expected;
            // Another stream writes the input.
            cudaDeviceSynchronize();
            {
                const c10::cuda::CUDAStreamGuard guard(warm ? *stream_
                                                            : c10::cuda::getStreamFromPool());
                expected = model(input);
                cudaDeviceSynchronize();
            }
            at::Tensor output;
            auto graph = capture(arena, raw(), [&] { output = model(input); }, options);
            shapes.push_back({input, expected, output, std::move(graph)});
        }
        return shapes;
    }

    int wrong(std::vector<Shape>& shapes, int rounds = 2, bool eager_between = false) {
        std::mt19937 random(7);
        std::vector<std::size_t> order(shapes.size());
        int wrong = 0;
        for (int round = 0; round < rounds; ++round) {
            for (std::size_t i = 0; i < order.size(); ++i) {
                order[i] = i;
            }
            std::shuffle(order.begin(), order.end(), random);
            for (const auto i : order) {
                shapes[i].graph.replay(raw());
                if (eager_between) {
                    const c10::cuda::CUDAStreamGuard guard(*stream_);
                    const auto a = at::randn({777, 4096}, half());
                    static_cast<void>(at::mm(a, a.t()).sum());
                }
                cudaDeviceSynchronize();
                wrong += !same(shapes[i]);
            }
        }
        return wrong;
    }

    static bool same(const Shape& shape) { return at::equal(shape.output, shape.expected); }

    void* raw() const { return stream_->stream(); }

    std::optional<c10::cuda::CUDAStream> stream_;
};

}  // namespace torch_tests
