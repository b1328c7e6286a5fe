// Concurrent executors on two devices, one thread each; on the CPU without a GPU.
#include <atomic>
#include <barrier>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "small.hpp"

namespace engine_tests {
namespace {

struct Outcome {
    int steps = 0;
    int wrong = 0;
    int eager = 0;
    // Steps that changed the current device.
    int moved = 0;
    ExecutorStats stats;
    std::string failure;
};

// Each graph has a product, because cuBLAS keeps workspaces per device.
void traffic(c10::DeviceIndex index, c10::DeviceIndex current, const ExecutorOptions& options,
             std::barrier<>& start, Outcome& outcome) {
    if (has_gpu()) {
        c10::cuda::set_device(current);
    }
    Small small(options, index);
    const auto factor = at::randn({128, 128}, on_device(at::kFloat, index));
    const auto expected = at::mm(factor, factor);
    const auto product = at::zeros_like(factor);
    wait(index);
    small.trouble = [&](Recorder&) { product.copy_(at::mm(factor, factor)); };
    std::mt19937 random(static_cast<unsigned>(index) + 5);
    Ran ran;
    start.arrive_and_wait();
    for (outcome.steps = 0; outcome.steps < most_steps(300); ++outcome.steps) {
        const bool decode = random() % 2 == 0;
        const auto n = static_cast<std::int64_t>(1 + random() % (decode ? 8 : 64));
        outcome.wrong +=
            !small.run(n, decode ? Phase::decode : Phase::mixed, ran, decode ? uniform_decode : 0,
                       decode ? 0 : static_cast<float>(random() % 10));
        outcome.eager += ran.mode == Mode::eager;
        outcome.wrong += !at::allclose(product, expected, 1e-3, 1e-3);
        product.zero_();
        outcome.moved += has_gpu() && c10::cuda::current_device() != current;
    }
    outcome.stats = small.executor->stats();
    outcome.failure = small.executor->last_failure();
    small.executor->clear();
    outcome.wrong += small.arena && small.arena->stats().blocks > 0;
}

void both_at_once(const vmmgraph::torch::CaptureOptions& capture, bool other_is_current) {
    if (c10::cuda::device_count() == 1) {
        GTEST_SKIP() << "needs two GPUs, and there is one";
    }
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    ExecutorOptions options;
    for (const auto size : {1U, 2U, 4U, 8U}) {
        options.full.push_back(Key::of(size, 0, uniform_decode));
    }
    options.piecewise = {Key::of(16), Key::of(64)};
    options.most_graphs = 4;
    options.capture = capture;
    std::barrier<> start(2);
    std::array<Outcome, 2> outcomes;
    std::vector<std::thread> threads;
    for (c10::DeviceIndex index = 0; index < 2; ++index) {
        threads.emplace_back([&, index] {
            const auto current =
                static_cast<c10::DeviceIndex>(other_is_current ? 1 - index : index);
            try {
                traffic(index, current, options, start, outcomes[static_cast<std::size_t>(index)]);
            } catch (const std::exception& error) {
                ADD_FAILURE() << "device " << int{index} << ": " << error.what();
                static_cast<void>(start.arrive());
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    for (const auto& outcome : outcomes) {
        EXPECT_EQ(outcome.steps, most_steps(300));
        EXPECT_EQ(outcome.wrong, 0);
        EXPECT_EQ(outcome.eager, 0) << outcome.failure;
        EXPECT_EQ(outcome.moved, 0);
        EXPECT_EQ(outcome.stats.failures, 0u) << outcome.failure;
        EXPECT_TRUE(outcome.stats.evictions > 0 || shortened());
        EXPECT_LE(outcome.stats.graphs, 4u);
    }
}

TEST(Devices, TwoCaptureAndReplayAtOnce) { both_at_once({}, false); }
TEST(Devices, WhateverDeviceIsCurrent) { both_at_once({}, true); }
TEST(Devices, TwoCaptureAndReplayAtOnceByPools) {
    both_at_once({vmmgraph::torch::Route::mempool, vmmgraph::Retain::inherit}, true);
}

bool two_gpus() { return c10::cuda::device_count() >= 2; }

// Each device has its own default stream.
TEST(Devices, InputsOnTheDefaultStreamMayGoWhileAnotherDeviceIsCurrent) {
    if (!two_gpus()) {
        GTEST_SKIP() << "needs two GPUs";
    }
    const c10::cuda::CUDAGuard current(1);
    std::atomic<bool> done{false};
    {
        GraphInputs param({Input::host("a", at::kInt, {Extent::along(Axis::tokens)})}, {Key::of(4)},
                          {device(0), 512});
        // More often than there are staging buffers.
        for (int turn = 0; turn < 3; ++turn) {
            param.update(Key::of(4), {{"a", std::vector<std::int32_t>{turn, 1, 2, 3}}}, nullptr);
            EXPECT_TRUE(at::equal(param.get("a").cpu(), at::tensor({turn, 1, 2, 3}, at::kInt)))
                << turn;
        }
        const c10::cuda::CUDAGuard its_own(0);
        const auto slow = [](void* done) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            static_cast<std::atomic<bool>*>(done)->store(true);
        };
        ASSERT_EQ(cudaLaunchHostFunc(nullptr, slow, &done), cudaSuccess);
    }
    EXPECT_TRUE(done.load()) << "the inputs' memory went back to torch in use";
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(c10::cuda::current_device(), 1);
    wait(0);
}

// Events belong to the inputs' device.
TEST(Devices, AHookMayLeaveAnotherDeviceBehind) {
    if (!two_gpus()) {
        GTEST_SKIP() << "needs two GPUs";
    }
    ExecutorOptions options;
    options.full = {Key::of(4), Key::of(8)};
    options.before_launch = [](const Key&, const Step&) { c10::cuda::set_device(1); };
    Small small(options);
    const auto second = c10::cuda::getStreamFromPool(false, 0);
    Ran ran;
    for (int turn = 0; turn < 4; ++turn) {
        // Raw handles need a mark per step.
        for (void* const on : {stream(), static_cast<void*>(second.stream()),
                               static_cast<void*>(cudaStreamLegacy)}) {
            const c10::cuda::CUDAGuard its_own(0);
            EXPECT_TRUE(small.run(1 + turn, Phase::decode, ran, 0, 0, true, on)) << turn;
            EXPECT_EQ(ran.mode, Mode::full);
        }
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Devices, ACaptureIsOnTheDeviceOfItsArena) {
    if (!two_gpus()) {
        GTEST_SKIP() << "needs two GPUs";
    }
    vmmgraph::torch::install();
    const auto mine = at::ones({1000}, on_device(at::kFloat, 0));
    wait(0);
    for (const auto route : {vmmgraph::torch::Route::blocks, vmmgraph::torch::Route::mempool}) {
        const vmmgraph::torch::CaptureOptions options{route, vmmgraph::Retain::inherit};
        vmmgraph::SharedVmmAllocator arena(0);
        const c10::cuda::CUDAGuard current(1);
        at::Tensor output;
        auto graph = vmmgraph::torch::capture(
            arena, stream(0),
            [&] {
                EXPECT_EQ(c10::cuda::current_device(), 0);
                output =
                    at::full({1000}, 2.0, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA)) +
                    mine;
            },
            options);
        EXPECT_EQ(c10::cuda::current_device(), 1);
        EXPECT_EQ(output.device(), device(0));
        graph.replay(stream(0));
        EXPECT_EQ(c10::cuda::current_device(), 1);
        wait(0);
        EXPECT_TRUE(at::equal(output, mine * 3));
        EXPECT_THROW(static_cast<void>(vmmgraph::torch::capture(
                         arena, stream(0), [] { throw std::runtime_error("planted"); }, options)),
                     std::runtime_error);
        EXPECT_EQ(c10::cuda::current_device(), 1);
        const auto why =
            refusal([&] { vmmgraph::torch::CaptureScope scope(arena, stream(1), options); });
        EXPECT_NE(why.find("cuda:0"), std::string::npos) << why;
        EXPECT_EQ(c10::cuda::current_device(), 1);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
}

TEST(Devices, AnExecutorIsRefusedWhatIsOnAnotherDevice) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    ExecutorOptions options;
    options.full = {Key::of(4)};
    GraphInputs inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)})},
                       options.full, {device(0), 512});
    const auto refused = [&](const std::shared_ptr<vmmgraph::SharedVmmAllocator>& arena) {
        return refusal([&] { GraphExecutor executor(arena, inputs, [](Recorder&) {}, options); });
    };
    vmmgraph::Options host;
    host.driver = vmmgraph::DriverChoice::host;
    EXPECT_NE(refused(std::make_shared<vmmgraph::SharedVmmAllocator>(0, host)).find("host driver"),
              std::string::npos);
    const auto right = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
    options.capture_stream = stream(0);
    EXPECT_EQ(refused(right), "");
    if (!two_gpus()) {
        return;
    }
    options.capture_stream = stream(1);
    const auto why_stream = refused(right);
    EXPECT_NE(why_stream.find("cuda:0"), std::string::npos) << why_stream;
    const auto why_arena = refused(std::make_shared<vmmgraph::SharedVmmAllocator>(1));
    EXPECT_NE(why_arena.find("cuda:1"), std::string::npos) << why_arena;
    EXPECT_NE(why_arena.find("cuda:0"), std::string::npos) << why_arena;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace engine_tests
