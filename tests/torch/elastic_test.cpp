// KV caches as tensors, on a GPU: graphs captured once over memory that grows and shrinks between
// replays, compared with plain tensors.
//
// `VMMGRAPH_ELASTIC_STEPS` sets the number of random steps (default 1,000).
#include "elastic.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vmmgraph/torch_region.hpp>

namespace torch_tests {
namespace {

class Layouts : public Elastic, public testing::WithParamInterface<KvLayout> {};

void write_blocks(const std::vector<at::Tensor>& planes, const at::Tensor& blocks,
                  const at::Tensor& contents) {
    for (auto plane : planes) {
        plane.index_put_({blocks}, contents);
    }
}

bool equal_blocks(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right,
                  const at::Tensor& blocks) {
    for (std::size_t plane = 0; plane < left.size(); ++plane) {
        if (!at::equal(left[plane].index({blocks}), right[plane].index({blocks}))) {
            return false;
        }
    }
    return true;
}

std::vector<at::Tensor> twin_of(const KvTensors& kv) {
    std::vector<at::Tensor> twin;
    for (const auto& plane : kv.planes()) {
        twin.push_back(at::zeros(plane.sizes(), plane.options()));
    }
    return twin;
}

TEST_P(Layouts, ATensorIsAPlaneOverAddressesThatStay) {
    KvTensors kv(*device_, kv_options(2, 8, 64, 10'000, GetParam(), 2 * MiB));
    ASSERT_EQ(kv.planes().size(), 4U);
    const auto plane = kv.planes()[1];
    EXPECT_EQ(plane.sizes(), (at::IntArrayRef{10'000, tokens, 8, 64}));
    EXPECT_EQ(plane.is_contiguous(), GetParam() == KvLayout::by_plane);
    EXPECT_TRUE(plane[7].is_contiguous());
    EXPECT_TRUE(plane.is_cuda());
    auto* const at = plane.data_ptr();
    kv.grow_to(200);
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    kv.before(raw());
    plane.narrow(0, 0, 200).fill_(3);
    kv.grow_to(1'000);
    plane.narrow(0, 200, 800).fill_(4);
    EXPECT_EQ(plane.data_ptr(), at);
    EXPECT_EQ(plane.narrow(0, 0, 1'000).sum(at::kDouble).item<double>(),
              (200 * 3 + 800 * 4) * tokens * 8 * 64.0);
    EXPECT_EQ(kv.cache().stats().backed_blocks, 1'000U);
    // The tensor is not an allocation of torch's allocator.
    EXPECT_NO_THROW(plane.record_stream(c10::cuda::getStreamFromPool()));
}

TEST_P(Layouts, GrowingBetweenReplaysInvalidatesNoGraph) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    KvTensors kv(*device_, kv_options(2, 8, 64, 20'000, GetParam(), 2 * MiB));
    const auto twin = twin_of(kv);
    SharedVmmAllocator arena(0);
    StepInputs in(8, 6, 8, 64);
    std::mt19937 random(3);
    kv.grow_to(64);
    kv.before(raw());
    cudaDeviceSynchronize();
    at::Tensor output;
    auto graph = capture(arena, raw(), [&] { output = attend(kv.planes(), in); });
    std::uint64_t blocks = 0;
    int wrong = 0, replays = 0;
    for (const std::uint64_t grown : {64, 65, 500, 4'000, 4'001, 20'000}) {
        kv.grow_to(grown);
        kv.before(raw());
        // New blocks have undefined contents.
        std::vector<std::int64_t> fresh(grown - blocks);
        std::iota(fresh.begin(), fresh.end(), static_cast<std::int64_t>(blocks));
        blocks = grown;
        if (!fresh.empty()) {
            const auto which = upload(fresh);
            const auto contents = at::randn({which.numel(), tokens, 8, 64}, half());
            write_blocks(kv.planes(), which, contents);
            write_blocks(twin, which, contents);
        }
        for (int round = 0; round < 20; ++round, ++replays) {
            std::vector<std::int64_t> chosen(8 * 6);
            for (auto& block : chosen) {
                block = static_cast<std::int64_t>(random() % blocks);
            }
            // Sequences write to distinct blocks.
            std::vector<std::int64_t> written(8);
            for (std::size_t i = 0; i < 8; ++i) {
                written[i] = static_cast<std::int64_t>((random() % (blocks / 8)) * 8 + i);
            }
            in.table.copy_(upload(chosen).view({8, 6}));
            in.block.copy_(upload(written));
            in.offset.random_(tokens);
            in.value.normal_();
            in.query.normal_();
            graph.replay(raw());
            wrong += !at::equal(output, attend(twin, in));
            wrong += !equal_blocks(kv.planes(), twin, in.block);
        }
    }
    EXPECT_EQ(wrong, 0);
    std::printf(
        "RESULT elastic, %s: one graph, %d replays while 64 blocks grew to %llu, %d wrong\n",
        name_of(GetParam()), replays, static_cast<unsigned long long>(blocks), wrong);
    cudaDeviceSynchronize();
}

TEST_P(Layouts, ShrinkingWhileAReplayRunsTakesNothingFromIt) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    KvTensors kv(*device_, kv_options(2, 8, 64, 8'192, GetParam(), 2 * MiB));
    const auto twin = twin_of(kv);
    SharedVmmAllocator arena(0);
    StepInputs in(32, 64, 8, 64);
    kv.grow_to(8'192);
    const auto all = at::arange(8'192, numbers());
    const auto contents = at::randn({8'192, tokens, 8, 64}, half());
    write_blocks(kv.planes(), all, contents);
    write_blocks(twin, all, contents);
    in.table.copy_(at::arange(32 * 64, numbers()).view({32, 64}) * 4);
    in.block.copy_(at::arange(32, numbers()) * 3);
    in.value.normal_();
    in.query.normal_();
    cudaDeviceSynchronize();
    at::Tensor output;
    auto graph = capture(arena, raw(), [&] { output = attend(kv.planes(), in); });
    const auto expected = attend(twin, in);
    cudaDeviceSynchronize();
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < 5; ++i) {
            graph.replay(raw());
        }
        // The running replays still read these blocks.
        const std::vector<BlockRange> busy{{5'000, 5'003}, {8'000, 8'001}};
        EXPECT_EQ(kv.cache().shrink_to(1'024, busy, fence()), 4U);
        EXPECT_EQ(kv.cache().stats().blocks, 1'024U);
        // Overwrites the freed memory.
        vmmgraph::RegionOptions options;
        options.page_bytes = 2 * MiB;
        vmmgraph::Region other(*device_, "other", options);
        void* const block = other.allocate(64 * MiB, raw());
        ASSERT_EQ(cudaMemsetAsync(block, 0xff, 64 * MiB, stream_->stream()), cudaSuccess);
        EXPECT_TRUE(at::equal(output, expected)) << round;
        cudaDeviceSynchronize();
        kv.cache().reap();
        EXPECT_EQ(kv.cache().memory().pending_unmap_bytes, 0U);
        EXPECT_LT(kv.cache().memory().committed_bytes, kv.cache().stats().block_bytes * 8'192 / 4);
        const auto live = upload({0, 512, 1'023, 5'000, 5'001, 5'002, 8'000});
        EXPECT_TRUE(equal_blocks(kv.planes(), twin, live)) << round;
        other.free(block);
        for (const auto range : busy) {
            kv.cache().release(range, fence());
        }
        EXPECT_EQ(kv.cache().stats().beyond_blocks, 0U);
        kv.grow_to(8'192);
        kv.before(raw());
        write_blocks(kv.planes(), all, contents);
    }
}

// Sequences join, grow and leave. One graph serves all; a twin of ordinary tensors does the same
// eagerly. Memory follows the pool's advice: on demand, ahead, released, limited.
TEST_P(Layouts, AThousandRandomStepsAreAPlainTwins) {
    constexpr std::int64_t batch = 32, table = 24;
    constexpr std::uint64_t most = 1'024;
    const long steps = setting("VMMGRAPH_ELASTIC_STEPS", 1'000);
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    KvTensors kv(*device_, kv_options(2, 8, 128, most, GetParam(), 2 * MiB));
    const auto twin = twin_of(kv);
    BlockPool pool(kv.cache());
    StepInputs in(batch, table, 8, 128);
    SharedVmmAllocator arena(0);
    std::mt19937 random(11);
    struct Sequence {
        std::vector<std::uint64_t> blocks;
        std::int64_t length;
    };
    std::vector<std::optional<Sequence>> sequences(batch);
    int commits = 0, ahead = 0, releases = 0, shrinks = 0, misses = 0, wrong = 0, captures = 0;
    std::optional<std::pair<vmmgraph::Pending, BlockRange>> coming;

    const auto commit = [&](BlockRange range) {
        kv.commit(range);
        kv.before(raw());
        pool.back(range);
        ++commits;
    };
    const auto arrive = [&] {
        coming->first.wait();
        kv.before(raw());
        pool.back(coming->second);
        coming.reset();
        ++ahead;
    };
    // Allocates blocks with defined contents unless the limit leaves too few.
    const auto take = [&](std::size_t count) -> std::optional<std::vector<std::uint64_t>> {
        auto blocks = pool.allocate(count);
        if (!blocks && coming) {
            arrive();
            blocks = pool.allocate(count);
        }
        if (!blocks) {
            const auto missing = pool.shortfall(count);
            if (!missing) {
                ++misses;
                return std::nullopt;
            }
            for (const auto range : *missing) {
                commit(range);
            }
            blocks = pool.allocate(count);
        }
        const auto which = upload({blocks->begin(), blocks->end()});
        const auto contents = at::randn({which.numel(), tokens, 8, 128}, half());
        write_blocks(kv.planes(), which, contents);
        write_blocks(twin, which, contents);
        return blocks;
    };
    // Slots without a sequence write to blocks of their own.
    const auto idle = take(batch);
    at::Tensor output;
    std::optional<CapturedGraph> graph;
    for (long step = 0; step < steps; ++step) {
        for (auto& sequence : sequences) {
            if (sequence && (sequence->length >= table * tokens || random() % 40 == 0)) {
                pool.free(sequence->blocks);
                sequence.reset();
            } else if (!sequence && random() % (step / 100 % 2 == 0 ? 8 : 80) == 0) {
                const auto length = static_cast<std::int64_t>(1 + random() % (table * tokens / 2));
                if (auto blocks = take(static_cast<std::size_t>((length + tokens - 1) / tokens))) {
                    sequence = Sequence{std::move(*blocks), length};
                }
            }
        }
        if (coming && coming->first.done()) {
            arrive();
        }
        if (!coming && random() % 10 == 0) {
            if (const auto missing = pool.shortfall(pool.stats().available + 64);
                missing && !missing->empty()) {
                coming.emplace(kv.cache().commit_async(missing->front()), missing->front());
            }
        }
        if (random() % 10 == 0) {
            for (const auto range : pool.surplus(random() % 128)) {
                EXPECT_EQ(pool.unback(range), 0U);
                kv.cache().release(range, fence());
                ++releases;
            }
        }
        if (!coming && random() % 50 == 0) {
            const auto a_page = kv.cache().stats().blocks_a_page;
            const auto limit = (most / 4 + random() % (most / 2)) / a_page * a_page;
            pool.set_limit(limit);
            for (const auto range : pool.surplus(most)) {
                pool.unback(range);
            }
            auto busy = pool.used({limit, most});
            for (auto& range : busy) {
                range = {range.first / a_page * a_page,
                         std::min(most, (range.end + a_page - 1) / a_page * a_page)};
            }
            kv.cache().shrink_to(limit, busy, fence());
            ++shrinks;
        } else if (random() % 50 == 0) {
            pool.set_limit(most);
        }

        std::vector<std::int64_t> block(batch), offset(batch), tables(batch * table);
        for (std::int64_t slot = 0; slot < batch; ++slot) {
            auto& sequence = sequences[static_cast<std::size_t>(slot)];
            const auto own = static_cast<std::int64_t>((*idle)[static_cast<std::size_t>(slot)]);
            if (sequence &&
                sequence->length == static_cast<std::int64_t>(sequence->blocks.size()) * tokens) {
                if (const auto more = take(1)) {
                    sequence->blocks.push_back(more->front());
                } else {
                    pool.free(sequence->blocks);
                    sequence.reset();
                }
            }
            for (std::int64_t i = 0; i < table; ++i) {
                const auto known =
                    sequence && i < static_cast<std::int64_t>(sequence->blocks.size());
                tables[static_cast<std::size_t>(slot * table + i)] =
                    known ? static_cast<std::int64_t>(sequence->blocks[static_cast<std::size_t>(i)])
                          : own;
            }
            block[static_cast<std::size_t>(slot)] =
                sequence ? static_cast<std::int64_t>(sequence->blocks.back()) : own;
            offset[static_cast<std::size_t>(slot)] = sequence ? sequence->length++ % tokens : 0;
        }
        in.block.copy_(upload(block));
        in.offset.copy_(upload(offset));
        in.table.copy_(upload(tables).view({batch, table}));
        in.value.normal_();
        in.query.normal_();
        if (!graph) {
            cudaDeviceSynchronize();
            graph.emplace(capture(arena, raw(), [&] { output = attend(kv.planes(), in); }));
            ++captures;
        }
        graph->replay(raw());
        wrong += !at::equal(output, attend(twin, in));
    }
    for (const auto& sequence : sequences) {
        if (sequence) {
            wrong += !equal_blocks(kv.planes(), twin,
                                   upload({sequence->blocks.begin(), sequence->blocks.end()}));
        }
    }
    if (coming) {
        arrive();
    }
    const auto memory = kv.cache().memory();
    std::printf(
        "RESULT elastic, %s: %ld random steps, %d captures, %d wrong; %d commits, %d ahead, %d "
        "releases, %d shrinks, %d misses; %llu pages "
        "mapped, %llu of them created, %llu revived, %llu unmapped\n",
        name_of(GetParam()), steps, captures, wrong, commits, ahead, releases, shrinks, misses,
        static_cast<unsigned long long>(memory.pages_mapped),
        static_cast<unsigned long long>(memory.pages_created),
        static_cast<unsigned long long>(memory.pages_revived),
        static_cast<unsigned long long>(memory.pages_unmapped));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(captures, 1);
    if (steps >= 1'000) {
        EXPECT_GT(memory.pages_unmapped, 0U);
        EXPECT_GT(releases, 0);
        EXPECT_GT(shrinks, 0);
    }
}

INSTANTIATE_TEST_SUITE_P(Elastic, Layouts, testing::Values(KvLayout::by_plane, KvLayout::by_block),
                         [](const auto& info) {
                             return info.param == KvLayout::by_plane ? "ByPlane" : "ByBlock";
                         });

TEST_F(Elastic, ATensorKeepsTheCacheAndItsMemoryGoesBehindTheWorkThatReadsIt) {
    const auto before = device_->stats().physical_bytes;
    const auto side = c10::cuda::getStreamFromPool();
    at::Tensor sum, view;
    {
        KvTensors kv(*device_, kv_options(1, 8, 64, 4'096, KvLayout::by_plane, 2 * MiB));
        kv.grow_to(4'096);
        kv.record_stream(side.stream());
        view = kv.planes()[1].narrow(0, 100, 2'000).select(1, 3);
    }
    view.fill_(2);
    EXPECT_GT(device_->stats().physical_bytes, before);
    cudaDeviceSynchronize();
    {
        const c10::cuda::CUDAStreamGuard guard(side);
        static const auto a = at::randn({4096, 4096}, half());
        for (int i = 0; i < 30; ++i) {
            static_cast<void>(at::mm(a, a));
        }
        sum = view.sum(at::kDouble);
    }
    view.reset();
    cudaDeviceSynchronize();
    EXPECT_EQ(sum.item<double>(), 2.0 * 2'000 * 8 * 64);
    device_->trim();
    EXPECT_EQ(device_->stats().physical_bytes, before);
}

TEST_F(Elastic, GrowsIntoWhatTorchOnlyKeepsForLater) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    std::size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    const auto most = static_cast<std::int64_t>(free / 10 * 6);
    const auto bytes = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    static_cast<void>(at::empty({most}, bytes));
    const KvTensorOptions options{{KvPlane{{1 << 20}, at::kByte}},
                                  static_cast<std::uint64_t>(most >> 20),
                                  KvLayout::by_plane,
                                  {"kv", 256 * MiB, 0, 0}};
    {
        KvTensors kv(*device_, options);
        EXPECT_NO_THROW(kv.grow_to(static_cast<std::uint64_t>(most >> 20)));
        EXPECT_THROW(kv.grow_to(static_cast<std::uint64_t>(most >> 20) + 1), vmmgraph::Error);
        kv.cache().shrink_to(0);
        EXPECT_NO_THROW(static_cast<void>(at::empty({most}, bytes)));
        c10::cuda::CUDACachingAllocator::emptyCache();
    }
}

}  // namespace
}  // namespace torch_tests
