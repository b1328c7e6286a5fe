// torch_npu's own allocator, streams and graphs over the stand-in of CANN's runtime: only tensors
// of a capture lie in its space. Without CANN's operators, captured work is fills and copies, which
// pass torch_npu's host queue.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <acl/acl.h>
#include <gtest/gtest.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <vmmgraph/torch_npu.hpp>

namespace npu = vmmgraph::torch_npu;

namespace {

constexpr std::size_t mib = 1 << 20;
const c10::Device device(c10::DeviceType::PrivateUse1, 0);

at::Tensor bytes(std::size_t count) {
    return at::empty({static_cast<std::int64_t>(count)},
                     at::TensorOptions().device(device).dtype(at::kByte));
}

std::uint8_t first(const at::Tensor& tensor) {
    std::uint8_t byte = 0;
    EXPECT_EQ(aclrtMemcpy(&byte, 1, tensor.data_ptr(), 1, ACL_MEMCPY_DEVICE_TO_HOST), 0);
    return byte;
}

void fill(const at::Tensor& tensor, int byte, aclrtStream stream) {
    ASSERT_EQ(aclrtMemsetAsync(tensor.data_ptr(), tensor.nbytes(), byte, tensor.nbytes(), stream),
              0);
}

class TorchNpu : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        // torch_npu's own aclInit call reports a repeated call, as in programs with ACL.
        ASSERT_EQ(aclInit(nullptr), 0);
        ASSERT_EQ(c10_npu::SetDevice(0), 0);
        c10_npu::NPUCachingAllocator::get()->init(1);
        static_cast<void>(bytes(1));
    }
    void SetUp() override {
        npu::install();
        c10_npu::setCurrentNPUStream(own);
    }
    void TearDown() override {
        c10_npu::setCurrentNPUStream(c10_npu::getDefaultNPUStream(0));
        npu::uninstall();
    }

    vmmgraph::SharedVmmAllocator arena{0, [] {
                                           vmmgraph::Options options;
                                           options.driver = vmmgraph::DriverChoice::ascend;
                                           return options;
                                       }()};
    c10_npu::NPUStream own = c10_npu::getNPUStreamFromPool(0);
    aclrtStream stream = own.stream();
};

TEST_F(TorchNpu, OutsideACaptureEverythingIsTorchNpusOwn) {
    npu::install();
    EXPECT_TRUE(npu::installed());
    EXPECT_STREQ(npu::built_for(), "2.14.0");
    auto* const ours = c10_npu::NPUCachingAllocator::get();
    const auto tensor = bytes(3 * mib);
    EXPECT_EQ(arena.stats().physical_bytes, 0U);
    std::size_t size = 0;
    EXPECT_NE(ours->getBaseAllocation(tensor.data_ptr(), &size), nullptr);
    EXPECT_GE(size, 3 * mib);
    EXPECT_EQ(ours->name(), "native");
    npu::uninstall();
    EXPECT_FALSE(npu::installed());
    EXPECT_NE(c10_npu::NPUCachingAllocator::get(), ours);
}

TEST_F(TorchNpu, GraphsShareThePagesOfTheirTensorsAndReplayRight) {
    const auto result = bytes(4096);
    std::vector<npu::CapturedGraph> graphs;
    std::vector<void*> addresses;
    std::uint64_t pages = 0;
    for (int graph = 0; graph < 3; ++graph) {
        npu::CaptureScope scope(arena, {vmmgraph::Retain::inherit, "graph"});
        {
            const auto scratch = bytes(20 * mib);
            const auto beginning = scratch.narrow(0, 0, 4096);
            addresses.push_back(scratch.data_ptr());
            fill(scratch, 40 + graph, stream);
            result.copy_(beginning);
        }
        graphs.push_back(scope.end());
        EXPECT_GE(graphs.back().report().peak_live_bytes, 20 * mib);
        EXPECT_EQ(graphs.back().space().label(), "graph");
        const auto now = arena.stats().physical_bytes;
        EXPECT_GE(now, 20 * mib);
        EXPECT_TRUE(pages == 0 || pages == now) << "another graph takes no more pages";
        pages = now;
    }
    std::sort(addresses.begin(), addresses.end());
    EXPECT_EQ(std::unique(addresses.begin(), addresses.end()), addresses.end())
        << "each graph has addresses of its own";
    for (const int graph : {0, 2, 1, 0}) {
        graphs[static_cast<std::size_t>(graph)].replay();
        EXPECT_EQ(first(result), 40 + graph);
    }
}

TEST_F(TorchNpu, ATensorThatIsAliveKeepsItsBytesAndOutlivesItsGraph) {
    at::Tensor kept;
    {
        npu::CaptureScope scope(arena);
        kept = bytes(2 * mib);
        fill(kept, 7, stream);
        auto graph = scope.end();
        graph.replay();
        const auto blocks = graph.space().live_blocks();
        ASSERT_EQ(blocks.size(), 1U);
        EXPECT_EQ(blocks.front(), kept.data_ptr());
        npu::CaptureScope other(arena);
        fill(bytes(2 * mib), 9, stream);
        other.end().replay();
        EXPECT_EQ(first(kept), 7) << "what is live when its capture ends is shared with nobody";
    }
    EXPECT_EQ(first(kept), 7);
    EXPECT_EQ(arena.stats().blocks, 1U);
    kept = at::Tensor();
    EXPECT_EQ(arena.stats().blocks, 0U);
}

TEST_F(TorchNpu, AnAbandonedCaptureLeavesTorchNpuAndTheArenaAsTheyWere) {
    EXPECT_THROW(
        {
            const npu::CaptureScope scope(arena);
            fill(bytes(mib), 1, stream);
            throw std::runtime_error("the model's");
        },
        std::runtime_error);
    EXPECT_EQ(arena.stats().blocks, 0U);
    const auto eager = bytes(mib);
    EXPECT_EQ(arena.stats().blocks, 0U) << "nothing is captured any more";
    npu::CaptureScope scope(arena);
    fill(bytes(mib), 2, stream);
    scope.end().replay();
}

TEST_F(TorchNpu, ALostCaptureIsAnErrorAndTheNextOneWorks) {
    auto* const allocator = c10_npu::NPUCachingAllocator::get();
    for (const bool end : {true, false}) {
        {
            npu::CaptureScope scope(arena);
            const auto tensor = bytes(mib);
            EXPECT_TRUE(allocator->hasCapturesUnderway(0));
            // CANN forbids this during any capture.
            EXPECT_NE(aclrtSynchronizeDevice(), 0);
            if (end) {
                EXPECT_THROW(static_cast<void>(scope.end()), c10::Error);
            }
        }
        EXPECT_FALSE(allocator->hasCapturesUnderway(0)) << end;
        EXPECT_EQ(arena.stats().blocks, 0U);
        const auto eager = bytes(mib);
        EXPECT_EQ(arena.stats().blocks, 0U);
        npu::CaptureScope scope(arena);
        fill(bytes(mib), 4, stream);
        scope.end().replay();
    }
}

TEST_F(TorchNpu, ACaptureThatCannotBeginLeavesNothingOpen) {
    auto* const allocator = c10_npu::NPUCachingAllocator::get();
    ASSERT_EQ(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_RELAXED), 0);
    EXPECT_THROW(npu::CaptureScope scope(arena), vmmgraph::Error);
    aclmdlRI others = nullptr;
    ASSERT_EQ(aclmdlRICaptureEnd(stream, &others), 0) << "the other capture goes on";
    ASSERT_EQ(aclmdlRIDestroy(others), 0);
    // Refused after the allocator has begun, or before.
    aclrtStream foreign = nullptr;
    ASSERT_EQ(aclrtCreateStream(&foreign), 0);
    c10_npu::setCurrentNPUStream(c10_npu::getStreamFromExternal(foreign, 0));
    EXPECT_THROW(npu::CaptureScope scope(arena), c10::Error);
    c10_npu::setCurrentNPUStream(own);
    EXPECT_EQ(aclrtDestroyStream(foreign), 0);
    EXPECT_FALSE(allocator->hasCapturesUnderway(0));
    const auto eager = bytes(mib);
    EXPECT_EQ(arena.stats().blocks, 0U);
    npu::uninstall();
    npu::install();
    npu::CaptureScope scope(arena);
    fill(bytes(mib), 5, stream);
    scope.end().replay();
}

TEST_F(TorchNpu, OutOfMemoryIsTorchsOwnErrorAndTheCaptureGoesOn) {
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::ascend;
    options.budget_bytes = 32 * mib;
    vmmgraph::SharedVmmAllocator small(0, options);
    npu::CaptureScope scope(small);
    EXPECT_THROW(static_cast<void>(bytes(64 * mib)), c10::OutOfMemoryError);
    const auto tensor = bytes(mib);
    fill(tensor, 3, stream);
    auto graph = scope.end();
    graph.replay();
    EXPECT_EQ(first(tensor), 3);
}

TEST_F(TorchNpu, WhatCannotBeCapturedIsRefused) {
    const auto status = [](auto&& call) {
        try {
            call();
        } catch (const vmmgraph::Error& error) {
            return error.status();
        }
        return static_cast<vmmgraph_status_t>(VMMGRAPH_OK);
    };
    c10_npu::setCurrentNPUStream(c10_npu::getDefaultNPUStream(0));
    EXPECT_EQ(status([&] { npu::CaptureScope scope(arena); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    c10_npu::setCurrentNPUStream(own);
    vmmgraph::Options host;
    host.driver = vmmgraph::DriverChoice::host;
    vmmgraph::SharedVmmAllocator other(0, host);
    EXPECT_EQ(status([&] { npu::CaptureScope scope(other); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    {
        npu::CaptureScope scope(arena);
        EXPECT_EQ(status([] { npu::uninstall(); }), VMMGRAPH_ERROR_WRONG_STATE);
        auto graph = scope.end();
        EXPECT_EQ(status([&] { static_cast<void>(scope.end()); }), VMMGRAPH_ERROR_WRONG_STATE);
        const auto moved = std::move(graph);
        EXPECT_EQ(status([&] { graph.replay(); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    npu::uninstall();
    EXPECT_EQ(status([&] { npu::CaptureScope scope(arena); }), VMMGRAPH_ERROR_WRONG_STATE);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
