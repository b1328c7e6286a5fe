// Captures over several streams, and replays and tensors on other streams.
#include <chrono>
#include <thread>

#include <vmmgraph/torch_eager.hpp>

#include "fixture.hpp"

namespace torch_tests {
namespace {

TEST_F(Torch, ForkedStreamsShareNothing) {
    SharedVmmAllocator arena;
    std::mt19937 random(3);
    const auto side = c10::cuda::getStreamFromPool();
    const auto side2 = c10::cuda::getStreamFromPool();
    const auto run = [&](const at::Tensor& x, c10::cuda::CUDAStream main) {
        cudaEvent_t forked = nullptr, joined = nullptr, joined2 = nullptr;
        for (auto* event : {&forked, &joined, &joined2}) {
            cudaEventCreateWithFlags(event, cudaEventDisableTiming);
        }
        auto a = x * 2;
        cudaEventRecord(forked, main.stream());
        cudaStreamWaitEvent(side.stream(), forked, 0);
        cudaStreamWaitEvent(side2.stream(), forked, 0);
        at::Tensor b, c;
        {
            const c10::cuda::CUDAStreamGuard guard(side);
            a.record_stream(side);
            b = (a + 1) * (a + 2);
        }
        {
            const c10::cuda::CUDAStreamGuard guard(side2);
            a.record_stream(side2);
            c = (a - 1) * (a - 2);
        }
        auto d = (x + 3) * (x + 4);
        a = at::Tensor();
        d = d * 2 + (x - 5);
        cudaEventRecord(joined, side.stream());
        cudaEventRecord(joined2, side2.stream());
        cudaStreamWaitEvent(main.stream(), joined, 0);
        cudaStreamWaitEvent(main.stream(), joined2, 0);
        b.record_stream(main);
        c.record_stream(main);
        auto result = b + c + d;
        for (auto* event : {forked, joined, joined2}) {
            cudaEventDestroy(event);
        }
        return result;
    };
    int wrong = 0;
    std::vector<std::pair<CapturedGraph, std::array<at::Tensor, 3>>> graphs;
    const long captures = setting("VMMGRAPH_FORKED_CAPTURES", 200);
    for (long n = 0; n < captures; ++n) {
        const auto x =
            at::randn({1 + static_cast<int>(random() % 4096), 1 + static_cast<int>(random() % 512)},
                      at::TensorOptions().device(at::kCUDA));
        cudaDeviceSynchronize();
        at::Tensor expected, output;
        {
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            expected = run(x, *stream_);
        }
        cudaDeviceSynchronize();
        auto graph = capture(arena, raw(), [&] { output = run(x, *stream_); });
        graphs.emplace_back(std::move(graph), std::array{x, expected, output});
        auto& some = graphs[random() % graphs.size()];
        some.first.replay(raw());
        cudaDeviceSynchronize();
        wrong += !at::equal(some.second[1], some.second[2]);
    }
    for (auto& [graph, tensors] : graphs) {
        graph.replay(raw());
        cudaDeviceSynchronize();
        wrong += !at::equal(tensors[1], tensors[2]);
    }
    EXPECT_EQ(wrong, 0);
}

TEST_F(Torch, RecordedTensorsAreUsedAgainOnceTheirStreamsAreJoined) {
    SharedVmmAllocator arena;
    constexpr int steps = 24;
    const auto side = c10::cuda::getStreamFromPool();
    const auto x =
        at::arange(4 << 20, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat)) % 17;
    auto total = at::zeros_like(x);
    cudaDeviceSynchronize();
    const auto wait = [](cudaStream_t waits, cudaStream_t other) {
        cudaEvent_t event = nullptr;
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        cudaEventRecord(event, other);
        cudaStreamWaitEvent(waits, event, 0);
        cudaEventDestroy(event);
    };
    auto graph = capture(arena, raw(), [&] {
        for (int step = 0; step < steps; ++step) {
            auto t = x * (step + 1);
            wait(side.stream(), stream_->stream());
            at::Tensor u;
            {
                const c10::cuda::CUDAStreamGuard guard(side);
                u = t + 1;
                t.record_stream(side);
            }
            t = at::Tensor();
            wait(stream_->stream(), side.stream());
            total.add_(u);
            u.record_stream(*stream_);
        }
    });
    EXPECT_LE(arena.stats().physical_bytes, 6 * x.nbytes());
    const auto expected = x * (steps * (steps + 1) / 2) + steps;
    for (int round = 0; round < 2; ++round) {
        total.zero_();
        cudaDeviceSynchronize();
        graph.replay(raw());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::allclose(total, expected));
    }
}

// A reader recorded after the capture delays the next capture's use of the memory.
// `VMMGRAPH_READER_PRODUCTS` sets its length (default 80 products; with fewer, the overlap is not
// checked).
TEST_F(Torch, ATensorReadOnAnotherStreamIsWaitedForWhenItAndItsGraphGo) {
    const auto elements = static_cast<std::int64_t>(32 * MiB);
    const long products = setting("VMMGRAPH_READER_PRODUCTS", 80);
    const auto side = c10::cuda::getStreamFromPool();
    const auto input = at::randn({elements}, half());
    const auto expected = input * 2;
    auto read = at::empty_like(input);
    const auto weights = at::randn({8192, 8192}, half()) * (1.0 / 128);
    auto busy = at::randn({8192, 8192}, half()), other = at::empty_like(busy);
    const auto read_slowly = [&](const at::Tensor& output) {
        const c10::cuda::CUDAStreamGuard guard(side);
        // At least 100 ms.
        for (long i = 0; i < products; ++i) {
            at::mm_out(other, busy, weights);
            std::swap(busy, other);
        }
        read.copy_(output);
    };
    read_slowly(expected);
    cudaDeviceSynchronize();
    int wrong = 0, overlapped = 0;
    for (const bool kept : {false, true}) {
        for (const bool graph_first : {false, true}) {
            for (int turn = 0; turn < 5; ++turn) {
                SharedVmmAllocator arena;
                const auto make = [&](const auto& body) {
                    std::optional<vmmgraph::torch::KeptScope> scope;
                    if (kept) {
                        scope.emplace();
                    }
                    return body();
                };
                at::Tensor output, next;
                std::optional<CapturedGraph> graph =
                    capture(arena, raw(), [&] { output = make([&] { return input * 2; }); });
                graph->replay(raw());
                read.zero_();
                cudaDeviceSynchronize();
                read_slowly(output);
                output.record_stream(side);
                if (graph_first) {
                    graph.reset();
                }
                output = at::Tensor();
                graph.reset();
                // Equally large.
                graph.emplace(capture(arena, raw(), [&] {
                    next = make([&] { return at::full({elements}, 9, half()); });
                }));
                graph->replay(raw());
                stream_->synchronize();
                overlapped += !side.query();
                cudaDeviceSynchronize();
                wrong += !at::equal(read, expected);
                wrong += !at::equal(next, at::full_like(next, 9));
            }
        }
    }
    EXPECT_EQ(wrong, 0);
    std::printf(
        "RESULT reader: 20 captures beside one, %d of them replayed before it was done, %d results "
        "wrong\n",
        overlapped, wrong);
    if (products >= 80) {
        EXPECT_GT(overlapped, 0)
            << "the reader was done before the next replay: the test shows nothing";
    }
}

TEST_F(Torch, PiecesStayOnTheirStreamWhateverRunsBetweenThem) {
    SharedVmmAllocator arena;
    const auto input = at::ones({1 << 16}, half());
    const auto output = at::zeros_like(input);
    cudaDeviceSynchronize();
    auto graph = [&] {
        vmmgraph::torch::CaptureScope scope(arena, raw());
        const auto doubled = input * 2;
        scope.next_piece();
        const auto more = doubled + 1;
        scope.next_piece();
        output.copy_(more * 3);
        return scope.end();
    }();
    ASSERT_EQ(graph.pieces(), 3u);
    const auto other = c10::cuda::getStreamFromPool(true);
    ASSERT_NE(other.stream(), raw());
    for (const int n : {1, 2}) {
        input.fill_(n);
        cudaDeviceSynchronize();
        // Delays the first piece: work on another stream would overtake it.
        const auto late = [](void*) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        };
        ASSERT_EQ(cudaLaunchHostFunc(stream_->stream(), late, nullptr), cudaSuccess);
        graph.replay(raw(), [&](std::size_t) {
            EXPECT_EQ(c10::cuda::getCurrentCUDAStream().stream(), raw());
            c10::cuda::setCurrentCUDAStream(other);
        });
        EXPECT_EQ(c10::cuda::getCurrentCUDAStream(), c10::cuda::getDefaultCUDAStream());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(output, at::full_like(output, (2 * n + 1) * 3))) << n;
    }
}

// Torch cannot represent the second handle of the legacy default stream.
TEST_F(Torch, TheDefaultStreamHasTwoHandles) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        auto all = shapes(arena, model, {64, 16}, options);
        for (void* const on : {static_cast<void*>(cudaStreamLegacy), static_cast<void*>(nullptr),
                               static_cast<void*>(cudaStreamPerThread)}) {
            for (auto& shape : all) {
                shape.output.zero_();
                cudaDeviceSynchronize();
                shape.graph.replay(on);
                cudaDeviceSynchronize();
                EXPECT_TRUE(at::equal(shape.output, shape.expected));
                EXPECT_EQ(shape.graph.verify(on, {{shape.output.data_ptr(), shape.output.nbytes()}})
                              .found,
                          0U);
            }
            EXPECT_EQ(c10::cuda::getCurrentCUDAStream(), c10::cuda::getDefaultCUDAStream());
        }
        EXPECT_EQ(wrong(all), 0);
        for (void* const on : {static_cast<void*>(cudaStreamLegacy), static_cast<void*>(nullptr)}) {
            try {
                static_cast<void>(capture(arena, on, [] {}, options));
                ADD_FAILURE() << "a capture began on the default stream";
            } catch (const vmmgraph::Error& error) {
                EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT) << error.what();
            }
        }
    }
    SharedVmmAllocator arena;
    for (void* const on : {static_cast<void*>(cudaStreamLegacy), static_cast<void*>(nullptr)}) {
        const auto before = torchs_bytes();
        const vmmgraph::torch::EagerScope scope(arena, on);
        const auto ours = at::zeros({1 << 20}, half());
        EXPECT_EQ(torchs_bytes(), before) << "it is not the arena's";
    }
}

}  // namespace
}  // namespace torch_tests
