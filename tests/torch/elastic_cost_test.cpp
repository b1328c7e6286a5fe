// Costs of elastic memory on a GPU: commits by plane and by block, attention over both layouts, and
// a cache that grows by 4 GiB while decoding.
//
// `VMMGRAPH_ELASTIC_GIB` sets the growth in GiB (default 4).
#include "elastic.hpp"
#include "median.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <string>
#include <utility>

namespace torch_tests {
namespace {

using Clock = std::chrono::steady_clock;
using vmmgraph::Ahead;
using vmmgraph::Pending;
using vmmgraph::PreCommit;

constexpr std::size_t layers = 36;
constexpr std::int64_t heads = 8, dimension = 128;

double micros_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double percentile(std::vector<double> values, double percent) {
    std::sort(values.begin(), values.end());
    const auto index =
        static_cast<std::size_t>(static_cast<double>(values.size() - 1) * percent / 100);
    return values.at(index);
}

using ElasticCosts = RoomyElastic;

// Time of the calling thread while the device is idle.
TEST_F(ElasticCosts, CommitsOfOneRangeOfBlocks) {
    for (const auto layout : {KvLayout::by_plane, KvLayout::by_block}) {
        for (const std::uint64_t page : {2 * MiB, 16 * MiB, 64 * MiB}) {
            KvTensors kv(*device_, kv_options(layers, heads, dimension, 16'384, layout, page));
            auto& cache = kv.cache();
            const auto a_page = cache.stats().blocks_a_page;
            const auto blocks =
                (static_cast<std::uint64_t>(4 * GiB) / cache.stats().block_bytes + a_page - 1) /
                a_page * a_page;
            std::vector<double> created, recycled, released;
            std::uint64_t pages = 0, bytes = 0;
            for (int round = 0; round < 5; ++round) {
                device_->trim();
                for (auto* const times : {&created, &recycled}) {
                    auto start = Clock::now();
                    const auto done = kv.grow_to(blocks);
                    times->push_back(micros_since(start) / (static_cast<double>(done.bytes) / GiB));
                    EXPECT_EQ(done.created, times == &created ? done.pages : 0U);
                    pages = done.pages;
                    bytes = done.bytes;
                    start = Clock::now();
                    cache.shrink_to(0);
                    cache.reap();
                    released.push_back(micros_since(start) /
                                       (static_cast<double>(done.bytes) / GiB));
                }
            }
            std::printf(
                "RESULT elastic: %zu layers %s, pages of %llu MiB, %llu pages for %.2f GiB: us a "
                "GiB with new pages %.0f, with free ones "
                "%.0f, "
                "given back %.0f\n",
                layers, name_of(layout), static_cast<unsigned long long>(page / MiB),
                static_cast<unsigned long long>(pages), static_cast<double>(bytes) / GiB,
                median(created), median(recycled), median(released));
        }
    }
}

// Device time over a context of 2,048 tokens.
TEST_F(ElasticCosts, AttentionOverBothLayouts) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    constexpr std::int64_t batch = 8, table = 128;
    constexpr std::uint64_t blocks = batch * table;
    StepInputs in(batch, table, heads, dimension);
    in.table.copy_(at::randperm(blocks, numbers()).view({batch, table}));
    in.block.copy_(in.table.select(1, table - 1));
    in.query.normal_();
    const auto time = [&](const std::vector<at::Tensor>& planes) {
        for (auto plane : planes) {
            plane.narrow(0, 0, static_cast<std::int64_t>(blocks)).fill_(0.5);
        }
        SharedVmmAllocator arena(0);
        cudaDeviceSynchronize();
        at::Tensor output;
        auto graph = capture(arena, raw(), [&] { output = attend(planes, in); });
        cudaEvent_t begin = nullptr, end = nullptr;
        C10_CUDA_CHECK(cudaEventCreate(&begin));
        C10_CUDA_CHECK(cudaEventCreate(&end));
        std::vector<double> times;
        for (int i = 0; i < 25; ++i) {
            C10_CUDA_CHECK(cudaEventRecord(begin, stream_->stream()));
            graph.replay(raw());
            C10_CUDA_CHECK(cudaEventRecord(end, stream_->stream()));
            C10_CUDA_CHECK(cudaEventSynchronize(end));
            float milliseconds = 0;
            C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
            if (i >= 5) {
                times.push_back(milliseconds);
            }
        }
        C10_CUDA_CHECK(cudaEventDestroy(begin));
        C10_CUDA_CHECK(cudaEventDestroy(end));
        return median(times);
    };
    double elastic[2] = {0, 0};
    for (const auto layout : {KvLayout::by_plane, KvLayout::by_block}) {
        KvTensors kv(*device_, kv_options(layers, heads, dimension, blocks, layout, 0));
        kv.grow_to(blocks);
        elastic[layout == KvLayout::by_block] = time(kv.planes());
    }
    double plain = 0;
    {
        const std::vector<at::Tensor> planes = [] {
            std::vector<at::Tensor> made;
            for (std::size_t i = 0; i < 2 * layers; ++i) {
                made.push_back(at::empty(
                    {static_cast<std::int64_t>(blocks), tokens, heads, dimension}, half()));
            }
            return made;
        }();
        plain = time(planes);
    }
    std::printf(
        "RESULT elastic: gather and attend, %zu layers, batch %lld, %lld tokens each: by plane "
        "%.3f ms, by block %.3f, torch's tensors "
        "%.3f\n",
        layers, static_cast<long long>(batch), static_cast<long long>(table * tokens), elastic[0],
        elastic[1], plain);
    EXPECT_LE(elastic[0], plain * 1.05);
}

enum class Growth { before, on_demand, ahead };

struct Decoded {
    // Microseconds of each step: in total, and waiting for mappings.
    std::vector<double> steps, exposed;
    std::uint64_t grown = 0;
    std::uint64_t late = 0;
};

// Decodes a batch of 64 until its cache has grown by the target. Sequences need new blocks at
// different steps.
class ElasticGrowth : public ElasticCosts {
protected:
    Decoded decode(const Model& model, KvLayout layout, Growth growth) {
        constexpr std::int64_t batch = 64, table = 4;
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        device_->trim();
        KvTensors kv(*device_, kv_options(layers, heads, dimension, 1 << 16, layout, 2 * MiB));
        auto& cache = kv.cache();
        BlockPool pool(cache);
        const auto block_bytes = cache.stats().block_bytes;
        const auto target = static_cast<std::uint64_t>(
                                static_cast<double>(setting("VMMGRAPH_ELASTIC_GIB", 4)) * GiB) /
                            block_bytes;
        const auto back = [&](BlockRange range) {
            kv.before(raw());
            pool.back(range);
        };
        const auto commit = [&](std::uint64_t count) {
            // Named, because a range-for over a temporary's contents would dangle.
            const auto missing = pool.shortfall(count).value();
            for (const auto range : missing) {
                kv.commit(range);
                back(range);
            }
        };
        // Watermarks of blocks committed ahead.
        constexpr std::uint64_t low = 128, high = 256;
        commit(growth == Growth::before  ? target + batch * table + 2 * high
               : growth == Growth::ahead ? batch * table + high
                                         : batch * table);
        const auto first = pool.allocate(batch * table).value();
        StepInputs in(batch, table, heads, dimension);
        for (auto plane : kv.planes()) {
            plane.index_put_({upload({first.begin(), first.end()})}, 0.25);
        }
        const auto pinned =
            at::empty({2, batch}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
        auto* const next = pinned.data_ptr<std::int64_t>();
        const auto where = at::zeros({2, batch}, numbers());
        in.block = where[0];
        in.offset = where[1];
        in.table.copy_(upload({first.begin(), first.end()}).view({batch, table}));
        for (std::int64_t i = 0; i < batch; ++i) {
            next[i] = static_cast<std::int64_t>(first[static_cast<std::size_t>(i * table)]);
            next[batch + i] = i % tokens;
        }
        auto hidden = at::randn({batch, model.layers[0][0].size(0)}, half());
        SharedVmmAllocator arena(0);
        cudaDeviceSynchronize();
        at::Tensor output;
        auto graph =
            capture(arena, raw(), [&] { output = model(hidden) + attend(kv.planes(), in).sum(); });

        PreCommit policy({low, high}, 4, 1'000'000);
        std::deque<std::pair<Pending, BlockRange>> coming;
        Decoded decoded;
        std::uint64_t granted = 0;
        for (std::uint64_t step = 0; decoded.grown < target || step < 500; ++step) {
            const auto start = Clock::now();
            double exposed = 0;
            for (std::int64_t i = 0; i < batch; ++i) {
                if (++next[batch + i] < tokens) {
                    continue;
                }
                auto block = pool.allocate(1);
                if (!block) {
                    const auto held_up = Clock::now();
                    if (!coming.empty()) {
                        // Submitted, but late.
                        coming.front().first.wait();
                        back(coming.front().second);
                        coming.pop_front();
                    } else {
                        commit(1);
                    }
                    exposed += micros_since(held_up);
                    ++decoded.late;
                    block = pool.allocate(1);
                }
                next[i] = static_cast<std::int64_t>(block.value().front());
                next[batch + i] = 0;
                ++granted;
                ++decoded.grown;
            }
            C10_CUDA_CHECK(cudaMemcpyAsync(where.data_ptr(), next, pinned.nbytes(),
                                           cudaMemcpyHostToDevice, stream_->stream()));
            graph.replay(raw());
            // Commits blocks ahead while the device decodes.
            if (growth == Growth::ahead) {
                while (!coming.empty() && coming.front().first.done()) {
                    coming.front().first.wait();
                    back(coming.front().second);
                    coming.pop_front();
                }
                std::uint64_t under_way = 0;
                for (const auto& [pending, range] : coming) {
                    under_way += range.end - range.first;
                }
                const auto [action, count] =
                    policy.step(step, pool.stats().available, under_way, std::exchange(granted, 0));
                if (action == Ahead::commit && coming.empty()) {
                    const auto missing = pool.shortfall(pool.stats().available + count).value();
                    for (const auto range : missing) {
                        coming.emplace_back(cache.commit_async(range), range);
                    }
                }
            }
            C10_CUDA_CHECK(cudaStreamSynchronize(stream_->stream()));
            if (step >= 20) {
                decoded.steps.push_back(micros_since(start));
                decoded.exposed.push_back(exposed);
            }
        }
        for (const auto& [pending, range] : coming) {
            pending.wait();
        }
        return decoded;
    }

    static void print(KvLayout layout, const char* how, const Decoded& decoded,
                      const Decoded& before) {
        double sum = 0;
        for (const double exposed : decoded.exposed) {
            sum += exposed;
        }
        std::printf(
            "RESULT elastic: decoding at batch 64 while it grows by %llu blocks of %zu layers %s, "
            "memory %s: step p50 %.1f us, p99 %.1f "
            "(%.3f and %.3f of all there before), %llu waits for mapping of %.1f us a step on "
            "average, p99 %.1f\n",
            static_cast<unsigned long long>(decoded.grown), layers, name_of(layout), how,
            median(decoded.steps), percentile(decoded.steps, 99),
            median(decoded.steps) / median(before.steps),
            percentile(decoded.steps, 99) / percentile(before.steps, 99),
            static_cast<unsigned long long>(decoded.late),
            sum / static_cast<double>(decoded.exposed.size()), percentile(decoded.exposed, 99));
    }
};

TEST_F(ElasticGrowth, CommittedAheadNoStepWaitsForMapping) {
    const Model model(16);
    for (const auto layout : {KvLayout::by_plane, KvLayout::by_block}) {
        const auto before = decode(model, layout, Growth::before);
        const auto demand = decode(model, layout, Growth::on_demand);
        const auto ahead = decode(model, layout, Growth::ahead);
        print(layout, "all there before", before, before);
        print(layout, "on demand", demand, before);
        print(layout, "ahead of need", ahead, before);
        EXPECT_EQ(before.late, 0U);
        EXPECT_GT(demand.late, 0U);
        EXPECT_EQ(ahead.late, 0U);
        EXPECT_LE(percentile(ahead.steps, 99), percentile(demand.steps, 99));
    }
}

}  // namespace
}  // namespace torch_tests
