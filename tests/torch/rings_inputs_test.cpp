// Latency of a step's inputs while units stream, on a GPU: a copy waits for the ring's earlier
// copies, a kernel does not.
#include "median.hpp"
#include "rings.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include <vmmgraph/engine.hpp>

namespace torch_tests {
namespace {

using vmmgraph::engine::Axis;
using vmmgraph::engine::Bring;
using vmmgraph::engine::Extent;
using vmmgraph::engine::GraphInputs;
using vmmgraph::engine::Input;
using vmmgraph::engine::InputsOptions;
using vmmgraph::engine::Key;
namespace names = vmmgraph::engine::names;

constexpr std::size_t units = 9;
constexpr std::uint64_t unit_bytes = 64 * MiB;
// 64 KiB.
constexpr std::int64_t input_tokens = 8192;
// Copies take 11 ms in total; by now some run.
constexpr auto under_way = std::chrono::milliseconds(2);

TEST_F(Rings, InputsDoNotWaitForWhatStreams) {
    auto host = host_numbers(unit_bytes, 1.0);
    Ring ring(*device_, ring_units(units, unit_bytes, false));
    for (std::size_t unit = 0; unit < units; ++unit) {
        ring.set_source(unit, host);
    }
    const auto body = [&] {
        auto sum = at::zeros({}, half());
        for (std::size_t unit = 0; unit < units; ++unit) {
            const UnitScope scope(ring, unit, raw());
            sum = sum + numbers_at(scope.address(), 0, {1024}).sum();
        }
        return sum;
    };
    {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        static_cast<void>(body());
    }
    cudaDeviceSynchronize();
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.ring = &ring;
    at::Tensor output;
    auto graph = capture(arena, raw(), [&] { output = body(); }, options);
    const auto other = c10::cuda::getStreamFromPool(true);
    cudaEvent_t start = nullptr, arrived = nullptr, begun = nullptr, over = nullptr;
    for (auto* const event : {&start, &arrived, &begun, &over}) {
        ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
    }
    // Device milliseconds from the commit of a step's inputs to their first reader on an otherwise
    // idle stream: next to a replay on another stream, and after an eager step's copies ahead.
    struct Times {
        std::vector<double> beside_replay, behind_eager, alone;
        double replay = 0;
        int wrong = 0;
        std::uint64_t by_kernel = 0;
    };
    const auto measure = [&](Bring bring) {
        GraphInputs inputs({Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)})},
                           {Key::of(input_tokens)}, InputsOptions{{c10::kCUDA, 0}, 512, bring});
        Times times;
        const auto once = [&](std::vector<double>& into, const std::function<void()>& before) {
            const auto values = at::randint(0, 1 << 20, {input_tokens}, at::kLong);
            inputs.prepare(Key::of(input_tokens), {{names::tokens, values}});
            cudaDeviceSynchronize();
            before();
            cudaEventRecord(start, other.stream());
            inputs.commit(other.stream());
            at::Tensor read;
            {
                const c10::cuda::CUDAStreamGuard guard(other);
                read = inputs.tokens() + 0;
            }
            cudaEventRecord(arrived, other.stream());
            cudaDeviceSynchronize();
            float milliseconds = 0;
            EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, arrived), cudaSuccess);
            into.push_back(milliseconds);
            times.wrong += !at::equal(read.cpu(), values);
        };
        std::vector<double> warm, replays;
        once(warm, [] {});
        for (int round = 0; round < 12; ++round) {
            once(times.alone, [] {});
            once(times.beside_replay, [&] {
                cudaEventRecord(begun, stream_->stream());
                graph.replay(raw());
                cudaEventRecord(over, stream_->stream());
                std::this_thread::sleep_for(under_way);
            });
            float milliseconds = 0;
            EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begun, over), cudaSuccess);
            replays.push_back(milliseconds);
            once(times.behind_eager, [&] {
                // Empties the ring, so the step copies every unit, and then ahead.
                ring.abort();
                const c10::cuda::CUDAStreamGuard guard(*stream_);
                static_cast<void>(body());
                std::this_thread::sleep_for(under_way);
            });
        }
        times.replay = median(replays);
        times.by_kernel = inputs.copies_by_kernel();
        return times;
    };
    const auto copy = measure(Bring::copy), kernel = measure(Bring::kernel),
               automatic = measure(Bring::automatic);
    for (const auto& [name, times] : {std::pair{"copy", &copy}, std::pair{"kernel", &kernel},
                                      std::pair{"automatic", &automatic}}) {
        std::printf(
            "RESULT inputs of 64 KiB by %s, ms until the first kernel that reads them: alone %.3f, "
            "beside a replay that streams %.0f MiB "
            "in %.2f ms %.3f, behind an eager step's copies %.3f; %d wrong\n",
            name, median(times->alone), static_cast<double>(units * unit_bytes) / MiB,
            times->replay, median(times->beside_replay), median(times->behind_eager), times->wrong);
        EXPECT_EQ(times->wrong, 0);
    }
    EXPECT_EQ(copy.by_kernel, 0U);
    EXPECT_EQ(kernel.by_kernel, automatic.by_kernel);
    EXPECT_GT(automatic.by_kernel, 0U);
    for (const auto* const times : {&kernel, &automatic}) {
        EXPECT_LT(median(times->beside_replay), 1.0);
        EXPECT_LT(median(times->behind_eager), 1.0);
    }
    // Control: a copy does wait.
    EXPECT_GT(median(copy.beside_replay), 2.0);
    for (auto* const event : {start, arrived, begun, over}) {
        cudaEventDestroy(event);
    }
}

}  // namespace
}  // namespace torch_tests
