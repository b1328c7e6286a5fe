// Captures in programs that have a life beside them: eager tensors that come and go, workspaces that others keep and clear, other captures.
#include "fixture.hpp"

#include <algorithm>
#include <limits>
#include <thread>

#include <c10/core/Event.h>
#include <vmmgraph/elastic.hpp>

namespace torch_tests {
namespace {

class Neighbours : public Torch {
protected:
    // Takes what is free in torch's cache, of every size, and writes over it.
    static void overwrite_what_is_free() {
        c10::cuda::CUDACachingAllocator::emptyCache();
        std::vector<at::Tensor> all;
        for (int turn = 0; turn < 8; ++turn) {
            for (const std::size_t bytes : {4096ul, MiB, 8 * MiB, 33 * MiB, 64 * MiB}) {
                all.push_back(at::full({static_cast<std::int64_t>(bytes / 2)}, std::numeric_limits<float>::quiet_NaN(), half()));
            }
        }
        cudaDeviceSynchronize();
    }

    static void expect_a_usable_allocator() {
        for (std::int64_t turn = 1; turn <= 64; ++turn) {
            EXPECT_NO_THROW(static_cast<void>(at::ones({turn * 100'000}, half()) + 1)) << turn;
        }
        EXPECT_NO_THROW(c10::cuda::CUDACachingAllocator::emptyCache());
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
};

// Whether torch minds other threads' frees while a stream is captured, up to 2.12. Later it records the event that it asks for all the same, and dies
// of it, with its own captures too.
template <class Allocator>
constexpr bool minds_other_threads = !requires(Allocator& allocator) { allocator.markCaptureEnd(0); };

// Torch must know that a capture is under way: else it records an event on the capturing stream and asks for it later.
TEST_F(Neighbours, ATensorThatTheCaptureStreamUsedMayBeFreedDuringACapture) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        for (const bool by_another_thread : {false, minds_other_threads<c10::cuda::CUDACachingAllocator::CUDAAllocator>}) {
            const auto input = at::ones({1 << 20}, half());
            const auto output = at::zeros_like(input);
            auto tensor = at::ones({static_cast<std::int64_t>(4 * MiB)}, half());
            tensor.record_stream(stream_->unwrap());
            cudaDeviceSynchronize();
            auto graph = capture(arena, raw(),
                                 [&] {
                                     const auto doubled = input * 2;
                                     const auto work = [&] {
                                         tensor = at::Tensor();
                                         // Torch looks at what was freed when it allocates.
                                         for (int turn = 0; turn < 4; ++turn) {
                                             static_cast<void>(at::empty({static_cast<std::int64_t>(30 * MiB)}, half()));
                                         }
                                     };
                                     if (by_another_thread) {
                                         std::thread(work).join();
                                     } else {
                                         work();
                                     }
                                     output.copy_(doubled + 1);
                                 },
                                 {route});
            expect_a_usable_allocator();
            graph.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(output, at::full_like(output, 3)));
        }
    }
}

// The storage has torch's allocator, and asks it.
TEST_F(Neighbours, AStorageOlderThanTheInstallationMayBeResizedInABody) {
    vmmgraph::torch::uninstall();
    // Empty: what it held would be copied in the body, and be read by every replay.
    auto old = at::empty({0}, half());
    vmmgraph::torch::install();
    SharedVmmAllocator arena;
    const auto output = at::zeros({1 << 22}, half());
    cudaDeviceSynchronize();
    auto graph = capture(arena, raw(), [&] {
        old.resize_({1 << 22});
        old.fill_(5);
        output.copy_(old * 2);
    });
    overwrite_what_is_free();
    graph.replay(raw());
    cudaDeviceSynchronize();
    EXPECT_TRUE(at::equal(output, at::full_like(output, 10)));
    EXPECT_TRUE(at::equal(old, at::full_like(old, 5)));
    overwrite_what_is_free();
    EXPECT_TRUE(at::equal(old, at::full_like(old, 5))) << "the graph's memory serves others";
    expect_a_usable_allocator();
}

TEST_F(Neighbours, ForwardedTensorsAreTorchsOwn) {
    const auto tensor = at::ones({1024}, half());
    EXPECT_EQ(tensor.storage().data_ptr().get_deleter(), c10::cuda::CUDACachingAllocator::get()->raw_deleter());
    SharedVmmAllocator arena;
    at::Tensor block;
    auto graph = capture(arena, raw(), [&] {
        block = at::ones({1024}, half());
        void* const raw_memory = c10::cuda::CUDACachingAllocator::get()->raw_allocate(4096);
        c10::cuda::CUDACachingAllocator::get()->raw_deallocate(raw_memory);
    });
    EXPECT_NE(block.storage().data_ptr().get_deleter(), c10::cuda::CUDACachingAllocator::get()->raw_deleter());
    block.record_stream(c10::cuda::getStreamFromPool().unwrap());
}

TEST_F(Neighbours, WhatCublasKeepsDoesNotHoldTheArena) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        auto device = vmmgraph::Device::open();
        device.trim();
        SharedVmmAllocator arena(device);
        const Model model(2, 1024);
        at::cuda::clearCublasWorkspaces();
        {
            // On the capture stream, no product came before.
            auto all = shapes(arena, model, {1, 2, 4, 8, 16, 32, 64, 128, 256}, {route});
            EXPECT_EQ(wrong(all), 0);
            // Also on a thread and a stream of its own.
            at::Tensor product;
            const auto side = c10::cuda::getStreamFromPool();
            auto graph = capture(arena, raw(),
                                 [&] {
                                     c10::Event fork(c10::kCUDA), join(c10::kCUDA);
                                     fork.record(stream_->unwrap());
                                     const auto x = at::ones({256, 1024}, half());
                                     std::thread([&] {
                                         const c10::cuda::CUDAStreamGuard guard(side);
                                         fork.block(side.unwrap());
                                         product = at::mm(at::ones({256, 1024}, half()), model.layers[0][0]);
                                         join.record(side.unwrap());
                                     }).join();
                                     join.block(stream_->unwrap());
                                     product = product + at::mm(x, model.layers[0][0]);
                                 },
                                 {route});
            graph.replay(raw());
            cudaDeviceSynchronize();
            product = at::Tensor();
        }
        static_cast<void>(capture(arena, raw(), [&] { static_cast<void>(at::ones({1}, half())); }, {route}));
        c10::cuda::CUDACachingAllocator::emptyCache();
        arena.trim();
        EXPECT_EQ(arena.mapped_size(), 0u) << static_cast<int>(route);
        EXPECT_EQ(device.stats().physical_bytes, 0u) << static_cast<int>(route);
    }
}

TEST_F(Neighbours, ClearedWorkspacesAreNobodysWhileAGraphHasThem) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 1024);
        const auto side = c10::cuda::getStreamFromPool();
        const auto wide = at::randn({64, 4096}, half());
        const auto weight = at::randn({4096, 4096}, half()) * (1.0 / 64);
        {
            // The side stream has one before the capture.
            const c10::cuda::CUDAStreamGuard guard(side);
            static_cast<void>(at::mm(wide, weight));
        }
        const auto expected = at::mm(at::mm(wide, weight), weight);
        cudaDeviceSynchronize();
        auto all = shapes(arena, model, {64, 128}, {route}, true);
        at::Tensor output;
        auto forked = capture(arena, raw(),
                              [&] {
                                  c10::Event fork(c10::kCUDA), join(c10::kCUDA);
                                  fork.record(stream_->unwrap());
                                  fork.block(side.unwrap());
                                  at::Tensor product;
                                  {
                                      const c10::cuda::CUDAStreamGuard guard(side);
                                      product = at::mm(at::mm(wide, weight), weight);
                                      join.record(side.unwrap());
                                  }
                                  join.block(stream_->unwrap());
                                  output = product.clone();
                              },
                              {route});
        at::cuda::clearCublasWorkspaces();
        overwrite_what_is_free();
        for (int turn = 0; turn < 3; ++turn) {
            forked.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(output, expected)) << turn;
            EXPECT_EQ(wrong(all, 1), 0);
            at::cuda::clearCublasWorkspaces();
            overwrite_what_is_free();
        }
    }
}

// Its workspace is in torch's table, and stays there.
TEST_F(Neighbours, AGraphOfTorchsOwnKeepsItsWorkspace) {
    const Model model(2, 1024);
    const auto input = at::randn({64, 1024}, half());
    at::Tensor output;
    at::cuda::CUDAGraph stock;
    cudaDeviceSynchronize();
    {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        output = model(input);
        cudaDeviceSynchronize();
        stock.capture_begin(at::cuda::graph_pool_handle(), cudaStreamCaptureModeThreadLocal);
        output = model(input);
        stock.capture_end();
    }
    const auto expected = model(input);
    cudaDeviceSynchronize();
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        auto all = shapes(arena, model, {64, 32}, {route});
        overwrite_what_is_free();
        for (int turn = 0; turn < 3; ++turn) {
            {
                const c10::cuda::CUDAStreamGuard guard(*stream_);
                stock.replay();
            }
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(output, expected));
            EXPECT_EQ(wrong(all, 1), 0);
        }
    }
}

TEST_F(Neighbours, TwoThreadsCaptureIntoOneArena) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        std::array<std::vector<Shape>, 2> all;
        std::vector<std::thread> threads;
        for (auto& mine : all) {
            // Torch has one generator, which no two captures may use.
            std::vector<at::Tensor> inputs;
            for (const int batch : {8, 16, 32, 64, 24, 48}) {
                inputs.push_back(at::randn({batch, 512}, half()));
            }
            cudaDeviceSynchronize();
            threads.emplace_back([&, inputs, stream = c10::cuda::getStreamFromPool(true)] {
                for (const auto& input : inputs) {
                    at::Tensor expected, output;
                    {
                        const c10::cuda::CUDAStreamGuard guard(stream);
                        expected = model(input);
                        stream.synchronize();
                    }
                    auto graph = capture(arena, stream.stream(), [&] { output = model(input); }, {route});
                    mine.push_back({input, expected, output, std::move(graph)});
                }
            });
        }
        for (auto& thread : threads) {
            thread.join();
        }
        for (auto& mine : all) {
            EXPECT_EQ(wrong(mine), 0) << static_cast<int>(route);
        }
    }
}

// Eager work gets what arenas have idle before torch gives up.
TEST_F(Neighbours, EagerWorkGetsWhatIdleArenasHold) {
    auto device = vmmgraph::Device::open();
    SharedVmmAllocator arena(device);
    std::size_t free = 0, total = 0;
    c10::cuda::CUDACachingAllocator::emptyCache();
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    const auto half_of_it = static_cast<std::int64_t>(free / 2);
    static_cast<void>(capture(arena, raw(), [&] { at::empty({half_of_it}, half().dtype(at::kChar)).fill_(1); }));
    EXPECT_GT(device.stats().free_bytes, static_cast<std::uint64_t>(half_of_it) - 64 * MiB);
    at::Tensor most;
    EXPECT_NO_THROW(most = at::empty({half_of_it / 4 * 7}, half().dtype(at::kChar)));
    EXPECT_EQ(device.stats().free_bytes, 0u);
    most = at::Tensor();
    c10::cuda::CUDACachingAllocator::emptyCache();
    // What is really too much is torch's own error still.
    EXPECT_THROW(static_cast<void>(at::empty({static_cast<std::int64_t>(total)}, half())), c10::OutOfMemoryError);
    expect_a_usable_allocator();
}

// An engine's cache makes room for torch's tensors: what it let go of before without being asked, the rest if it is asked, and never for nothing.
TEST_F(Neighbours, EagerWorkGetsWhatAnEnginesCacheGivesUp) {
    auto device = vmmgraph::Device::open();
    SharedVmmAllocator arena(device);
    static_cast<void>(capture(arena, raw(), [] { at::full({1 << 20}, 1, half()); }));
    c10::cuda::CUDACachingAllocator::emptyCache();
    std::size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    constexpr std::uint64_t block = 64 * MiB;
    vmmgraph::ElasticOptions pages;
    pages.page_bytes = block;
    const std::uint64_t most = free / block - 2;
    vmmgraph::KvCache cache(device, {{block}, most, vmmgraph::KvLayout::by_plane, pages});
    cache.grow_to(most);
    const auto kept =
        at::from_blob(reinterpret_cast<void*>(cache.plane(0).address), {static_cast<std::int64_t>(block)}, half().dtype(at::kChar));
    kept.fill_(7);
    const auto tensor = [](std::uint64_t blocks) {
        return at::empty({static_cast<std::int64_t>(blocks * block)}, half().dtype(at::kChar)).fill_(1);
    };
    const auto gone = [] {
        cudaDeviceSynchronize();
        c10::cuda::CUDACachingAllocator::emptyCache();
    };
    // Shrunk behind a stream that is done by then: nobody has asked the cache since.
    std::uint64_t blocks = most - 16;
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, static_cast<cudaStream_t>(raw())), cudaSuccess);
    cache.shrink_to(blocks, {}, {{}, {event}});
    EXPECT_NO_THROW(static_cast<void>(tensor(14)));
    gone();
    std::vector<std::uint64_t> asked;
    const vmmgraph::Reclaimer engine(
        device,
        [&](std::uint64_t bytes) {
            asked.push_back(bytes);
            const auto fewer = std::min((bytes + block - 1) / block, blocks - 1);
            blocks -= fewer;
            cache.shrink_to(blocks);
            return fewer * block;
        },
        9);
    const auto room = (most - blocks) + 2;
    EXPECT_NO_THROW(static_cast<void>(tensor(room + 20)));
    ASSERT_EQ(asked.size(), 1U);
    // For what is missing beside the sixteen and two to three that are free.
    EXPECT_GE(asked[0], 18 * block);
    EXPECT_LE(asked[0], 22 * block);
    EXPECT_EQ(cache.stats().blocks, blocks);
    gone();
    // A limit of torch's own, and more than there is: nothing that it gave up would help.
    c10::cuda::CUDACachingAllocator::setMemoryFraction(0.01, 0);
    EXPECT_THROW(static_cast<void>(tensor(room + 10)), c10::OutOfMemoryError);
    c10::cuda::CUDACachingAllocator::setMemoryFraction(1.0, 0);
    EXPECT_THROW(static_cast<void>(tensor(total / block + 1)), c10::OutOfMemoryError);
    EXPECT_EQ(asked.size(), 1U);
    EXPECT_TRUE(at::eq(kept, 7).all().item<bool>());
    ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
    expect_a_usable_allocator();
}

// As is right for torch's own memory, which stays mapped: the tensor goes as soon as the work that reads it was given to the stream.
TEST_F(Neighbours, AnOutputMayBeDroppedRightAfterWorkThatReadsIt) {
    SharedVmmAllocator arena;
    const auto input = at::randn({1 << 24}, half());
    const auto expected = input * 2;
    const auto weights = at::randn({4096, 4096}, half()) * (1.0 / 64);
    cudaDeviceSynchronize();
    int wrong = 0;
    for (const bool on_default : {true, false}) {
        for (const bool graph_first : {true, false}) {
            for (int turn = 0; turn < 5; ++turn) {
                at::Tensor read;
                {
                    at::Tensor output;
                    std::optional<CapturedGraph> graph = capture(arena, raw(), [&] { output = input * 2; });
                    graph->replay(raw());
                    cudaDeviceSynchronize();
                    c10::cuda::OptionalCUDAStreamGuard guard;
                    if (!on_default) {
                        guard.reset_stream(*stream_);
                    }
                    // The reader waits its turn.
                    auto busy = weights;
                    for (int i = 0; i < 40; ++i) {
                        busy = at::mm(busy, weights);
                    }
                    read = output.clone();
                    if (graph_first) {
                        graph.reset();
                    }
                    output = at::Tensor();
                }
                arena.mark();
                // Somebody asks, so that what may go goes.
                at::Tensor other;
                auto next = capture(arena, raw(), [&] { other = at::full({1 << 24}, 9, half()); });
                next.replay(raw());
                cudaDeviceSynchronize();
                wrong += !at::equal(read, expected);
            }
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Tensors of captures that failed are the program's, each with memory of its own.
TEST_F(Neighbours, TensorsOfFailedCapturesKeepWhatIsWrittenToThem) {
    SharedVmmAllocator arena;
    std::vector<at::Tensor> kept;
    for (int turn = 0; turn < 6; ++turn) {
        EXPECT_THROW(static_cast<void>(capture(arena, raw(),
                                               [&] {
                                                   kept.push_back(at::empty({1 << 20}, half()));
                                                   throw std::runtime_error("planted");
                                               })),
                     std::runtime_error);
    }
    for (int turn = 0; turn < 6; ++turn) {
        kept[turn].fill_(turn);
    }
    const Model model(2, 512);
    auto all = shapes(arena, model, {64});
    EXPECT_EQ(wrong(all), 0);
    for (int turn = 0; turn < 6; ++turn) {
        EXPECT_TRUE(at::equal(kept[turn], at::full_like(kept[turn], turn))) << turn;
    }
}

TEST_F(Neighbours, MoreThanThereCanBeIsOutOfMemory) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const auto body = [] { static_cast<void>(at::empty({std::int64_t{1} << 50}, half())); };
        EXPECT_THROW(static_cast<void>(capture(arena, raw(), body, {route})), c10::OutOfMemoryError);
    }
}

// A program that allocates to a pool of its own: torch would assert in the destructor of ours.
TEST_F(Neighbours, AGraphMayGoWhileTheProgramAllocatesToAPool) {
    SharedVmmAllocator arena;
    for (const auto route : {Route::blocks, Route::mempool}) {
        const auto pool = at::cuda::graph_pool_handle();
        std::optional<CapturedGraph> graph = capture(arena, raw(), [&] { static_cast<void>(at::ones({1 << 20}, half())); }, {route});
        c10::cuda::CUDACachingAllocator::beginAllocateToPool(0, pool, [](cudaStream_t) { return false; });
        graph.reset();
        c10::cuda::CUDACachingAllocator::endAllocateToPool(0, pool);
        c10::cuda::CUDACachingAllocator::releasePool(0, pool);
    }
    // Its pool goes with the next one.
    static_cast<void>(capture(arena, raw(), [&] { static_cast<void>(at::ones({1}, half())); }, {Route::mempool}));
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

TEST_F(Neighbours, AGraphThatWasMovedFromSaysSo) {
    SharedVmmAllocator arena;
    auto graph = capture(arena, raw(), [&] { static_cast<void>(at::ones({16}, half())); });
    const auto moved = std::move(graph);
    EXPECT_EQ(moved.pieces(), 1u);
    EXPECT_EQ(graph.pieces(), 0u);
    EXPECT_EQ(graph.memset_kernels(), 0u);
    EXPECT_THROW(graph.replay(raw()), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(graph.verify(raw(), {})), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(graph.report()), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(graph.space()), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(graph.exec()), vmmgraph::Error);
}

}  // namespace
}  // namespace torch_tests
