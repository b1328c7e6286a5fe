// Steps on alternating streams, and streams that are captured, destroyed or per-thread.
#include <array>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "../torch/other_capture.hpp"
#include "../torch/torchs_bytes.hpp"
#include "small.hpp"

namespace engine_tests {
namespace {

constexpr std::uint32_t count = 1 << 18;

class Numbers {
public:
    explicit Numbers(Bring bring = Bring::automatic)
        : inputs(std::make_unique<GraphInputs>(
              std::vector{Input::host("a", at::kLong, {Extent::along(Axis::tokens)})},
              std::vector{Key::of(count)}, InputsOptions{device(), 512, bring})) {}

    void prepare(std::int64_t number) {
        inputs->prepare(Key::of(count), {{"a", at::full({count}, number, at::kLong)}});
    }
    void update(std::int64_t number, void* stream) {
        prepare(number);
        inputs->commit(stream);
    }
    // As seen by `stream`.
    [[nodiscard]] at::Tensor seen(cudaStream_t stream) const {
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, 0));
        return inputs->get("a").clone();
    }

    std::unique_ptr<GraphInputs> inputs;
};

bool all_are(const at::Tensor& tensor, std::int64_t number) {
    return tensor.eq(number).all().item<bool>();
}

TEST(Streams, CommitsOnTwoAreInOrder) {
    NEEDS_A_GPU();
    Numbers numbers;
    const std::array streams{c10::cuda::getStreamFromPool(), c10::cuda::getStreamFromPool()};
    std::vector<at::Tensor> seen;
    for (int n = 0; n < 20; ++n) {
        const auto& on = streams[static_cast<std::size_t>(n % 2)];
        numbers.update(n, on.stream());
        seen.push_back(numbers.seen(on.stream()));
    }
    wait();
    for (int n = 0; n < 20; ++n) {
        EXPECT_TRUE(all_are(seen[static_cast<std::size_t>(n)], n)) << n;
    }
}

// Work on the new stream would join the capture.
TEST(Streams, ACommitIsRefusedWhileThatOfTheLastOneIsCaptured) {
    NEEDS_A_GPU();
    const other::Stream first;
    const other::Stream second;
    Numbers numbers;
    numbers.update(1, first.get());
    const auto before = numbers.seen(first.get());
    wait();
    {
        other::Capture capture(first.get());
        numbers.prepare(2);
        EXPECT_NE(
            refusal([&] { numbers.inputs->commit(second.get()); }, VMMGRAPH_ERROR_STREAM_CAPTURING),
            "");
        EXPECT_NE(refusal([&] { numbers.inputs->mark(); }, VMMGRAPH_ERROR_STREAM_CAPTURING), "");
        EXPECT_TRUE(capture.end());
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    EXPECT_EQ(cudaStreamIsCapturing(second.get(), &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
    numbers.inputs->commit(second.get());
    const auto after = numbers.seen(second.get());
    wait();
    EXPECT_TRUE(all_are(before, 1));
    EXPECT_TRUE(all_are(after, 2));
}

TEST(Streams, AMarkedOneMayBeCapturedAndWhatItHadStillComesFirst) {
    NEEDS_A_GPU();
    const other::Stream first;
    const other::Stream second;
    Numbers numbers;
    // Torch's first allocation per stream.
    static_cast<void>(numbers.seen(first.get()));
    static_cast<void>(numbers.seen(second.get()));
    for (int turn = 0; turn < 3; ++turn) {
        numbers.update(1, first.get());
        wait();
        Gate gate(first.get());
        const auto before = numbers.seen(first.get());
        numbers.inputs->mark();
        other::Capture capture(first.get());
        numbers.update(2, second.get());
        const auto after = numbers.seen(second.get());
        EXPECT_TRUE(capture.end());
        gate.open();
        wait();
        EXPECT_TRUE(all_are(before, 1)) << turn;
        EXPECT_TRUE(all_are(after, 2)) << turn;
    }
}

// CUDA forbids the legacy default stream while a blocking stream is captured.
TEST(Streams, TheDefaultOneIsRefusedBesideACaptureOnAStreamThatItWaitsFor) {
    NEEDS_A_GPU();
    const other::Stream waited_for(cudaStreamDefault);
    const other::Stream second;
    Numbers numbers;
    numbers.update(1, nullptr);
    wait();
    for (void* const on : {static_cast<void*>(nullptr), static_cast<void*>(second.get())}) {
        numbers.prepare(2);
        other::Capture capture(waited_for.get());
        EXPECT_NE(refusal([&] { numbers.inputs->commit(on); }, VMMGRAPH_ERROR_STREAM_CAPTURING),
                  "");
        // Inputs are zeroed on torch's current stream.
        EXPECT_NE(refusal([] { const Numbers others; }, VMMGRAPH_ERROR_STREAM_CAPTURING), "");
        EXPECT_TRUE(capture.end());
    }
    numbers.inputs->commit(nullptr);
    wait();
    EXPECT_TRUE(all_are(numbers.inputs->get("a"), 2));
}

// All threads share the handle.
TEST(Streams, AnotherThreadsDefaultOneIsWaitedFor) {
    NEEDS_A_GPU();
    Numbers numbers;
    numbers.update(1, cudaStreamPerThread);
    static_cast<void>(numbers.seen(cudaStreamPerThread));
    wait();
    for (int turn = 0; turn < 3; ++turn) {
        numbers.update(1, cudaStreamPerThread);
        Gate gate(cudaStreamPerThread);
        const auto before = numbers.seen(cudaStreamPerThread);
        at::Tensor after;
        std::thread([&] {
            numbers.update(2, cudaStreamPerThread);
            after = numbers.seen(cudaStreamPerThread);
        }).join();
        gate.open();
        wait();
        EXPECT_TRUE(all_are(before, 1)) << turn;
        EXPECT_TRUE(all_are(after, 2)) << turn;
    }
}

// A capturing stream cannot be queried.
TEST(Streams, InputsThatGoWhileTheirsIsCapturedLeaveTheirMemoryUntilItCanBeAsked) {
    NEEDS_A_GPU();
    {
        const Numbers first;
    }
    const auto stream = c10::cuda::getStreamFromPool(false, 0);
    const auto before = torchs_bytes();
    {
        Numbers numbers;
        {
            // Torch never destroys this stream.
            const c10::cuda::CUDAStreamGuard guard(stream);
            numbers.update(1, stream.stream());
        }
        wait();
        other::Capture capture(stream.stream());
        numbers.inputs.reset();
        EXPECT_GE(torchs_bytes() - before, std::int64_t{count} * 8)
            << "somebody else may write there now";
        {
            const Numbers others;
        }
        EXPECT_GE(torchs_bytes() - before, std::int64_t{count} * 8) << "the capture has not ended";
        EXPECT_TRUE(capture.end());
    }
    {
        const Numbers others;
    }
    EXPECT_EQ(torchs_bytes(), before);
    wait();
}

// Later inputs must not use its handle.
TEST(Streams, ThatOfInputsThatWentWhileItWasCapturedMayBeDestroyed) {
    NEEDS_A_GPU();
    const auto before = torchs_bytes();
    {
        const other::Stream stream;
        Numbers numbers;
        numbers.update(1, stream.get());
        wait();
        other::Capture capture(stream.get());
        numbers.inputs.reset();
        EXPECT_TRUE(capture.end());
    }
    for (int turn = 0; turn < 2; ++turn) {
        const Numbers others;
    }
    EXPECT_GE(torchs_bytes() - before, std::int64_t{count} * 8)
        << "somebody else may write there now";
    wait();
}

// Torch cannot represent the second handle of the legacy default stream.
TEST(Streams, TheDefaultOneHasTwoHandles) {
    NEEDS_A_GPU();
    ExecutorOptions options;
    options.full = {Key::of(4), Key::of(8)};
    options.piecewise = {Key::of(16)};
    options.most_tokens = 20;
    options.eager_in_arena = true;
    options.update = [](const Key&, const Step&, vmmgraph::torch::CapturedGraph*) {};
    options.update_stream = cudaStreamLegacy;
    Small small(options);
    Ran ran;
    const auto before = c10::cuda::getCurrentCUDAStream(0);
    for (void* const on :
         {static_cast<void*>(cudaStreamLegacy), stream(), static_cast<void*>(cudaStreamLegacy),
          static_cast<void*>(cudaStreamPerThread)}) {
        for (const auto n : {3, 7, 11, 30}) {
            EXPECT_TRUE(small.run(n, n < 8 ? Phase::decode : Phase::mixed, ran, 0, 0, true, on))
                << n;
            EXPECT_EQ(ran.mode, n < 8 ? Mode::full : n < 20 ? Mode::piecewise : Mode::eager) << n;
        }
    }
    EXPECT_EQ(c10::cuda::getCurrentCUDAStream(0), before);
    Numbers numbers;
    numbers.update(1, cudaStreamLegacy);
    numbers.update(2, nullptr);
    numbers.update(3, cudaStreamLegacy);
    wait();
    EXPECT_TRUE(all_are(numbers.inputs->get("a"), 3));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    options.capture_stream = cudaStreamLegacy;
    Small refused(options);
    EXPECT_TRUE(refused.run(3, Phase::decode, ran));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    EXPECT_NE(refused.executor->last_failure().find("non-default stream"), std::string::npos)
        << refused.executor->last_failure();
}

// CUDA crashes on queries of a destroyed stream's capture status (H200, driver 580).
TEST(Streams, ThatOfAStepMayBeDestroyedBehindIt) {
    NEEDS_A_GPU();
    ExecutorOptions options;
    options.full = {Key::of(4), Key::of(8)};
    options.piecewise = {Key::of(16), Key::of(64)};
    Small small(options);
    for (const auto n : {3, 7, 11, 30, 3, 7, 11, 30}) {
        const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
        const auto expected = small.table.index_select(0, tokens.to(small.table.device()));
        wait();
        at::Tensor output;
        {
            const other::Stream stream;
            const c10::cuda::CUDAStreamGuard guard(
                c10::cuda::getStreamFromExternal(stream.get(), 0));
            const float none = 0;
            small.executor->run(
                {Key::of(static_cast<std::uint32_t>(n)), n < 8 ? Phase::decode : Phase::mixed, true,
                 &none},
                {{names::tokens, tokens}}, [] { FAIL() << "no step of these is eager"; },
                stream.get());
            output = small.inputs->hidden_states(n).clone();
        }
        wait();
        EXPECT_TRUE(at::allclose(output, expected)) << n;
    }
    // Also the capture stream.
    small.executor.reset();
    {
        const other::Stream capturing;
        options.capture_stream = capturing.get();
        small.executor = std::make_unique<GraphExecutor>(
            small.arena, *small.inputs, [&](Recorder& recorder) { small.body(recorder); }, options);
        EXPECT_EQ(small.executor->warm_up(), 4U);
        wait();
    }
    Ran ran;
    for (const auto n : {3, 7, 11, 30}) {
        EXPECT_TRUE(small.run(n, n < 8 ? Phase::decode : Phase::mixed, ran)) << n;
    }
}

}  // namespace
}  // namespace engine_tests
