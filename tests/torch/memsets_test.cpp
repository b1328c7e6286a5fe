// Memset nodes replaced by kernels.
#include <chrono>
#include <cstdint>
#include <utility>

#include "../../cpp/torch/memsets.hpp"
#include "fixture.hpp"

namespace torch_tests {
namespace {

using Region = std::pair<std::int64_t, std::int64_t>;

// Sets each [offset, length), then copies all bytes to `seen`.
void memsets(const at::Tensor& bytes, const std::vector<Region>& regions, const at::Tensor& seen,
             cudaStream_t stream) {
    bytes.fill_(0x77);
    int value = 0x81;
    for (const auto& [offset, length] : regions) {
        ASSERT_EQ(cudaMemsetAsync(static_cast<char*>(bytes.mutable_data_ptr()) + offset, value++,
                                  static_cast<std::size_t>(length), stream),
                  cudaSuccess);
    }
    seen.copy_(bytes);
}

at::Tensor bytes_of(std::int64_t size) {
    return at::zeros({size}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
}

cudaStream_t current() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Uses a memset, unlike torch's zero_().
void clear(const at::Tensor& bytes) {
    ASSERT_EQ(cudaMemsetAsync(bytes.mutable_data_ptr(), 0, bytes.nbytes(), current()), cudaSuccess);
}

TEST_F(Torch, MemsetsBecomeKernelsThatWriteTheSame) {
    SharedVmmAllocator arena;
    // One byte, whole words, a partial word, an unaligned start, an overlap, and more than a page.
    const std::vector<Region> regions{
        {0, 1},      {4, 4},      {64, 62},   {130, 9},
        {259, 1000}, {512, 4096}, {1024, 64}, {8192, std::int64_t{5} << 20}};
    const auto bytes = bytes_of(std::int64_t{8} << 20);
    const auto seen = bytes_of(bytes.size(0));
    const auto expected = bytes_of(bytes.size(0));
    memsets(bytes, regions, expected, current());
    cudaDeviceSynchronize();
    for (const auto route : {Route::blocks, Route::mempool}) {
        for (const bool kernels : {true, false}) {
            CaptureOptions options{route};
            options.memset_kernels = kernels;
            auto graph =
                capture(arena, raw(), [&] { memsets(bytes, regions, seen, current()); }, options);
            EXPECT_EQ(graph.memset_kernels(), kernels ? regions.size() : 0u);
            seen.zero_();
            bytes.zero_();
            cudaDeviceSynchronize();
            graph.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(seen, expected))
                << "route " << static_cast<int>(route) << ", kernels " << kernels;
        }
    }
}

// In a separate branch, between two others, first and last.
TEST_F(Torch, AMemsetKeepsItsPlaceInTheGraph) {
    SharedVmmAllocator arena;
    const auto bytes = bytes_of(1 << 22);
    const auto seen = bytes_of(bytes.size(0));
    const auto other = c10::cuda::getStreamFromPool();
    const auto body = [&] {
        clear(bytes);
        for (int i = 1; i <= 20; ++i) {
            bytes.add_(i);
            cudaEvent_t fork = nullptr;
            ASSERT_EQ(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), cudaSuccess);
            ASSERT_EQ(cudaEventRecord(fork, current()), cudaSuccess);
            ASSERT_EQ(cudaStreamWaitEvent(other.stream(), fork, 0), cudaSuccess);
            // The halves run concurrently: memset then kernel in one branch, kernel then memset in
            // the other.
            {
                const c10::cuda::CUDAStreamGuard guard(other);
                auto half = bytes.narrow(0, 0, 1 << 21);
                clear(half.narrow(0, 1 << 19, 1 << 20));
                half.add_(3);
                ASSERT_EQ(cudaEventRecord(fork, other.stream()), cudaSuccess);
            }
            auto half = bytes.narrow(0, 1 << 21, 1 << 21);
            half.mul_(2);
            clear(half.narrow(0, 12345, 1 << 18));
            ASSERT_EQ(cudaStreamWaitEvent(current(), fork, 0), cudaSuccess);
            ASSERT_EQ(cudaEventDestroy(fork), cudaSuccess);
        }
        seen.copy_(bytes);
        clear(bytes);
    };
    body();
    cudaDeviceSynchronize();
    const auto expected = seen.clone();
    auto graph = capture(arena, raw(), body);
    EXPECT_EQ(graph.memset_kernels(), 42u);
    for (int i = 0; i < 20; ++i) {
        seen.zero_();
        bytes.fill_(9);
        cudaDeviceSynchronize();
        graph.replay(raw());
        cudaDeviceSynchronize();
        ASSERT_TRUE(at::equal(seen, expected)) << i;
    }
    EXPECT_EQ(bytes.sum().item<std::int64_t>(), 0);
}

// Pitched rows, in any piece.
TEST_F(Torch, WhatIsNoRowOfBytesStaysAMemset) {
    SharedVmmAllocator arena;
    const auto bytes = bytes_of(64 * 256);
    const auto body = [&] {
        bytes.fill_(1);
        ASSERT_EQ(cudaMemset2DAsync(bytes.mutable_data_ptr(), 256, 7, 100, 64, current()),
                  cudaSuccess);
        ASSERT_EQ(cudaMemset2DAsync(bytes.mutable_data_ptr(), 256, 3, 256, 2, current()),
                  cudaSuccess);
    };
    body();
    cudaDeviceSynchronize();
    const auto expected = bytes.clone();
    vmmgraph::torch::CaptureScope scope(arena, raw());
    body();
    scope.next_piece();
    clear(bytes.narrow(0, 0, 10));
    auto graph = scope.end();
    EXPECT_EQ(graph.memset_kernels(), 2u);
    bytes.zero_();
    cudaDeviceSynchronize();
    graph.replay(raw(), [&](std::size_t) { EXPECT_TRUE(at::equal(bytes, expected)); });
    cudaDeviceSynchronize();
    EXPECT_EQ(bytes.narrow(0, 0, 11).to(at::kInt).sum().item<int>(), 3);
}

// As for the capture's other kernels.
TEST_F(Torch, KernelsForMemsetsHaveThePriorityOfTheirStream) {
    const auto bytes = bytes_of(4096);
    for (const bool high : {true, false}) {
        const auto stream = c10::cuda::getStreamFromPool(high);
        const c10::cuda::CUDAStreamGuard guard(stream);
        bytes.add_(1);
        cudaDeviceSynchronize();
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeThreadLocal),
                  cudaSuccess);
        bytes.add_(1);
        clear(bytes);
        bytes.add_(1);
        ASSERT_EQ(cudaStreamEndCapture(stream.stream(), &graph), cudaSuccess);
        EXPECT_EQ(vmmgraph::torch::replace_memsets(graph, stream), 1u);
        std::size_t count = 3;
        std::array<cudaGraphNode_t, 3> nodes{};
        ASSERT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
        EXPECT_EQ(count, 3u);
        for (const auto node : nodes) {
            cudaKernelNodeAttrValue value{};
            ASSERT_EQ(
                cudaGraphKernelNodeGetAttribute(node, cudaKernelNodeAttributePriority, &value),
                cudaSuccess);
            EXPECT_EQ(value.priority, stream.priority());
        }
        ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    }
}

TEST_F(Torch, ALaunchCostsTheHostNoMoreForItsMemsets) {
    SharedVmmAllocator arena;
    const auto bytes = bytes_of(4096);
    double medians[2];
    for (const bool kernels : {false, true}) {
        CaptureOptions options;
        options.memset_kernels = kernels;
        auto graph = capture(
            arena, raw(),
            [&] {
                for (int i = 0; i < 36; ++i) {
                    clear(bytes.narrow(0, 0, 256));
                    for (int j = 0; j < 10; ++j) {
                        bytes.add_(1);
                    }
                }
            },
            options);
        std::vector<double> times;
        for (int round = 0; round < 550; ++round) {
            cudaDeviceSynchronize();
            const auto start = std::chrono::steady_clock::now();
            graph.replay(raw());
            const auto time =
                std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                    .count();
            if (round >= 50) {
                times.push_back(time);
            }
        }
        cudaDeviceSynchronize();
        std::sort(times.begin(), times.end());
        medians[kernels ? 1 : 0] = times[times.size() / 2];
    }
    std::printf(
        "RESULT memsets: a launch of 360 kernels and 36 memsets costs the host %.2f us, with "
        "kernels for memsets %.2f us\n",
        medians[0], medians[1]);
    EXPECT_LT(medians[1], medians[0]);
}

}  // namespace
}  // namespace torch_tests
