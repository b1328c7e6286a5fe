// Captures next to other activity: eager tensors, workspaces kept and cleared by torch, and
// concurrent captures.
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
    // Allocates and overwrites torch's free cached memory.
    static void overwrite_what_is_free() {
        c10::cuda::CUDACachingAllocator::emptyCache();
        std::vector<at::Tensor> all;
        for (int turn = 0; turn < 8; ++turn) {
            for (const std::size_t bytes : {4096ul, MiB, 8 * MiB, 33 * MiB, 64 * MiB}) {
                all.push_back(at::full({static_cast<std::int64_t>(bytes / 2)},
                                       std::numeric_limits<float>::quiet_NaN(), half()));
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

// Up to 2.12, torch tolerates other threads' frees during a capture. Later releases fail, also in
// torch's own captures.
template <class Allocator>
constexpr bool minds_other_threads =
    !requires(Allocator& allocator) { allocator.markCaptureEnd(0); };

// Unless torch knows about the capture, it records an event on the capturing stream and queries it
// later.
TEST_F(Neighbours, ATensorThatTheCaptureStreamUsedMayBeFreedDuringACapture) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        for (const bool by_another_thread :
             {false, minds_other_threads<c10::cuda::CUDACachingAllocator::CUDAAllocator>}) {
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
                                         // Torch processes freed blocks at the next allocation.
                                         for (int turn = 0; turn < 4; ++turn) {
                                             static_cast<void>(at::empty(
                                                 {static_cast<std::int64_t>(30 * MiB)}, half()));
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

// The storage calls torch's allocator directly.
TEST_F(Neighbours, AStorageOlderThanTheInstallationMayBeResizedInABody) {
    vmmgraph::torch::uninstall();
    // Empty: old contents would be copied in the body.
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
    EXPECT_EQ(tensor.storage().data_ptr().get_deleter(),
              c10::cuda::CUDACachingAllocator::get()->raw_deleter());
    SharedVmmAllocator arena;
    at::Tensor block;
    auto graph = capture(arena, raw(), [&] {
        block = at::ones({1024}, half());
        void* const raw_memory = c10::cuda::CUDACachingAllocator::get()->raw_allocate(4096);
        c10::cuda::CUDACachingAllocator::get()->raw_deallocate(raw_memory);
    });
    EXPECT_NE(block.storage().data_ptr().get_deleter(),
              c10::cuda::CUDACachingAllocator::get()->raw_deleter());
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
            auto all = shapes(arena, model, {1, 2, 4, 8, 16, 32, 64, 128, 256}, {route});
            EXPECT_EQ(wrong(all), 0);
            // On another thread and stream.
            at::Tensor product;
            const auto side = c10::cuda::getStreamFromPool();
            auto graph =
                capture(arena, raw(),
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
        static_cast<void>(
            capture(arena, raw(), [&] { static_cast<void>(at::ones({1}, half())); }, {route}));
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

// The workspace stays in torch's table.
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
            // Torch has one generator, which two captures cannot share.
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
                    auto graph =
                        capture(arena, stream.stream(), [&] { output = model(input); }, {route});
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

TEST_F(Neighbours, EagerWorkGetsWhatIdleArenasHold) {
    auto device = vmmgraph::Device::open();
    SharedVmmAllocator arena(device);
    std::size_t free = 0, total = 0;
    c10::cuda::CUDACachingAllocator::emptyCache();
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    const auto half_of_it = static_cast<std::int64_t>(free / 2);
    static_cast<void>(
        capture(arena, raw(), [&] { at::empty({half_of_it}, half().dtype(at::kChar)).fill_(1); }));
    EXPECT_GT(device.stats().free_bytes, static_cast<std::uint64_t>(half_of_it) - 64 * MiB);
    at::Tensor most;
    EXPECT_NO_THROW(most = at::empty({half_of_it / 4 * 7}, half().dtype(at::kChar)));
    EXPECT_EQ(device.stats().free_bytes, 0u);
    most = at::Tensor();
    c10::cuda::CUDACachingAllocator::emptyCache();
    EXPECT_THROW(static_cast<void>(at::empty({static_cast<std::int64_t>(total)}, half())),
                 c10::OutOfMemoryError);
    expect_a_usable_allocator();
}

// Freed blocks come first, without a request. A hopeless allocation asks for no blocks.
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
    const auto kept = at::from_blob(reinterpret_cast<void*>(cache.plane(0).address),
                                    {static_cast<std::int64_t>(block)}, half().dtype(at::kChar));
    kept.fill_(7);
    const auto tensor = [](std::uint64_t blocks) {
        return at::empty({static_cast<std::int64_t>(blocks * block)}, half().dtype(at::kChar))
            .fill_(1);
    };
    const auto gone = [] {
        cudaDeviceSynchronize();
        c10::cuda::CUDACachingAllocator::emptyCache();
    };
    // The stream has finished since; the cache was not polled again.
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
    // The shortfall beyond the freed blocks.
    EXPECT_GE(asked[0], 18 * block);
    EXPECT_LE(asked[0], 22 * block);
    EXPECT_EQ(cache.stats().blocks, blocks);
    gone();
    // More room would not help: torch's own limit, or more than the device has.
    c10::cuda::CUDACachingAllocator::setMemoryFraction(0.01, 0);
    EXPECT_THROW(static_cast<void>(tensor(room + 10)), c10::OutOfMemoryError);
    c10::cuda::CUDACachingAllocator::setMemoryFraction(1.0, 0);
    EXPECT_THROW(static_cast<void>(tensor(total / block + 1)), c10::OutOfMemoryError);
    EXPECT_EQ(asked.size(), 1U);
    EXPECT_TRUE(at::eq(kept, 7).all().item<bool>());
    ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
    expect_a_usable_allocator();
}

// As with torch's own memory, which stays mapped.
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
                    std::optional<CapturedGraph> graph =
                        capture(arena, raw(), [&] { output = input * 2; });
                    graph->replay(raw());
                    cudaDeviceSynchronize();
                    c10::cuda::OptionalCUDAStreamGuard guard;
                    if (!on_default) {
                        guard.reset_stream(*stream_);
                    }
                    // Work before the reader delays it.
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
        EXPECT_THROW(static_cast<void>(capture(arena, raw(), body, {route})),
                     c10::OutOfMemoryError);
    }
}

// While the program allocates to its own pool, torch would assert in our pool's destructor.
TEST_F(Neighbours, AGraphMayGoWhileTheProgramAllocatesToAPool) {
    SharedVmmAllocator arena;
    for (const auto route : {Route::blocks, Route::mempool}) {
        const auto pool = at::cuda::graph_pool_handle();
        std::optional<CapturedGraph> graph =
            capture(arena, raw(), [&] { static_cast<void>(at::ones({1 << 20}, half())); }, {route});
        c10::cuda::CUDACachingAllocator::beginAllocateToPool(0, pool,
                                                             [](cudaStream_t) { return false; });
        graph.reset();
        c10::cuda::CUDACachingAllocator::endAllocateToPool(0, pool);
        c10::cuda::CUDACachingAllocator::releasePool(0, pool);
    }
    // The postponed pool is freed with the next one.
    static_cast<void>(
        capture(arena, raw(), [&] { static_cast<void>(at::ones({1}, half())); }, {Route::mempool}));
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
