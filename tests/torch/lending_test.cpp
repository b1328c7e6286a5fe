// Leases on a GPU: their cost, and random traffic over pages shared by graphs and a KV cache.
//
// `VMMGRAPH_LENDING_STEPS` sets the number of random steps (default 10,000).
#include "elastic.hpp"
#include "median.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <unordered_set>
#include <vmmgraph/lease.hpp>
#include <vmmgraph/torch_eager.hpp>

#include "../../examples/xllm_executor/memory.hpp"

namespace torch_tests {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using vmmgraph::ArenaOptions;
using vmmgraph::Borrower;
using vmmgraph::Lease;
using vmmgraph::Vacate;
using vmmgraph::Vacated;
using vmmgraph::torch::EagerScope;
using xllm_example::MemoryOptions;
using xllm_example::ServingMemory;

double millis_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

ArenaOptions pages_of(std::uint64_t bytes) {
    ArenaOptions options;
    options.large_page_bytes = bytes;
    return options;
}

using Lending = RoomyElastic;

// Time of the calling thread: the borrower returns pages at once, and the device is idle.
TEST_F(Lending, EightGibibytesAreLentAndRecalled) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    constexpr std::uint64_t blocks = 4096;
    std::map<std::uint64_t, std::pair<double, double>> took;
    for (const std::uint64_t page : {16 * MiB, 32 * MiB, 64 * MiB}) {
        device_->trim();
        SharedVmmAllocator arena(*device_, pages_of(page));
        auto space = arena.open_space();
        std::vector<void*> all;
        for (int i = 0; i < 8; ++i) {
            all.push_back(space.allocate(std::size_t{1} << 30, raw()));
        }
        for (auto* const block : all) {
            space.free(block);
        }
        space.seal();
        KvTensors kv(*device_, kv_options(32, 8, 128, blocks, KvLayout::by_block, page));
        ASSERT_EQ(kv.cache().stats().block_bytes, 2 * MiB);
        Borrower engine([&](const Vacate& asked) -> std::optional<Vacated> {
            return Vacated{asked.blocks, fence()};
        });
        std::vector<double> lent, recalled;
        for (int round = 0; round < 9; ++round) {
            cudaDeviceSynchronize();
            auto start = Clock::now();
            Lease lease = vmmgraph::lend(arena, kv.cache(), {0, blocks}, engine);
            lent.push_back(millis_since(start));
            EXPECT_EQ(lease.bytes(), static_cast<std::uint64_t>(8 * GiB));
            kv.before(raw());
            auto last = kv.planes().back().narrow(0, blocks - 64, 64);
            last.fill_(round);
            EXPECT_EQ(last.sum(at::kDouble).item<double>(),
                      static_cast<double>(round * last.numel()));
            bool launched = false;
            EXPECT_THROW(space.replay(raw(), [&] { launched = true; }), vmmgraph::Error);
            EXPECT_FALSE(launched);
            cudaDeviceSynchronize();
            start = Clock::now();
            lease.recall(5s);
            recalled.push_back(millis_since(start));
            EXPECT_EQ(lease.bytes(), 0U);
            space.replay(raw(), [&] { launched = true; });
            EXPECT_TRUE(launched);
        }
        const auto pages = 8 * GiB / static_cast<double>(page);
        took[page] = {median(lent), median(recalled)};
        std::printf(
            "RESULT lending: 8 GiB in pages of %llu MiB: lent in %.2f ms (%.1f us a page), "
            "recalled in %.2f ms (%.1f us a page)\n",
            static_cast<unsigned long long>(page / MiB), took[page].first,
            took[page].first / pages * 1e3, took[page].second, took[page].second / pages * 1e3);
    }
    const auto [lend, recall] = took.at(32 * MiB);
    EXPECT_LE(lend, 10);
    EXPECT_LE(recall, 15);
}

// The prefill announces its size.
TEST_F(Lending, EagerWorkThatNeedsLittleLeavesLeasesAlone) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    constexpr std::uint64_t page = 16 * MiB;
    SharedVmmAllocator arena(*device_, pages_of(page));
    const auto work = [](std::uint64_t bytes, double value) {
        const auto tensor =
            at::full({static_cast<std::int64_t>(bytes / sizeof(float))}, value, at::kCUDA);
        // In place: no temporary of equal size.
        return tensor.eq_(value).min().item<float>() == 1;
    };
    {
        const EagerScope scope(arena, raw());
        EXPECT_TRUE(work(8 * page, 1));
    }
    KvTensors kv(*device_, kv_options(32, 8, 128, 4096, KvLayout::by_block, page));
    Borrower engine([&](const Vacate& asked) -> std::optional<Vacated> {
        return Vacated{asked.blocks, fence()};
    });
    const auto pages = kv.cache().stats().blocks_a_page;
    Lease lease = vmmgraph::lend(arena, kv.cache(), {0, 5 * pages}, engine);
    const auto lent = lease.bytes();
    kv.before(raw());
    const auto blocks = static_cast<std::int64_t>(5 * pages);
    for (const auto& plane : kv.planes()) {
        plane.narrow(0, 0, blocks).fill_(7);
    }
    EXPECT_THROW(EagerScope(arena, raw()), vmmgraph::Error);
    at::Tensor result;
    for (int round = 0; round < 20; ++round) {
        const EagerScope scope(arena, raw(), 3 * page);
        EXPECT_TRUE(work(3 * page - MiB, round + 2));
        EXPECT_ANY_THROW(at::empty({static_cast<std::int64_t>(5 * page)},
                                   at::TensorOptions(at::kCUDA).dtype(at::kByte)));
        if (round == 10) {
            result = at::full({1024}, 3.0, at::kCUDA);
        }
    }
    EXPECT_EQ(lease.bytes(), lent);
    for (const auto& plane : kv.planes()) {
        EXPECT_TRUE(plane.narrow(0, 0, blocks).eq(7).all().item<bool>());
    }
    EXPECT_TRUE(result.eq(3).all().item<bool>());
    // With a recall timeout the scope may exceed its announcement.
    vmmgraph::set_recall(arena, 5s);
    {
        const EagerScope scope(arena, raw(), 3 * page);
        EXPECT_TRUE(work(6 * page, 5));
    }
    EXPECT_EQ(lease.bytes(), 0U);
}

// Sequences with random contents, on leased pages and in plain tensors.
class Traffic {
public:
    static constexpr std::int64_t batch = 16, table = 8, heads = 8, dimension = 64;

    Traffic(ServingMemory& memory, const std::vector<at::Tensor>& twin)
        : memory_(memory), twin_(twin) {
        memory_.on_recall([this](const std::vector<std::uint64_t>& blocks) {
            const std::unordered_set<std::uint64_t> wanted(blocks.begin(), blocks.end());
            leave([&](const std::vector<std::uint64_t>& sequence) {
                return std::any_of(sequence.begin(), sequence.end(),
                                   [&](std::uint64_t block) { return wanted.count(block) > 0; });
            });
        });
    }

    // Removes some sequences and adds new ones.
    void churn(std::mt19937& random, std::size_t most) {
        leave([&](const auto&) { return random() % 16 == 0; });
        std::vector<std::int64_t> fresh;
        memory_.prepare(std::min(most - std::min(most, sequences_.size()), std::size_t{64}) *
                        table);
        for (int joined = 0; joined < 64 && sequences_.size() < most; ++joined) {
            auto blocks = memory_.allocate(table);
            if (!blocks) {
                break;
            }
            fresh.insert(fresh.end(), blocks->begin(), blocks->end());
            sequences_.push_back(std::move(*blocks));
        }
        if (fresh.empty()) {
            return;
        }
        const auto which = at::tensor(fresh, at::TensorOptions().dtype(at::kLong)).to(at::kCUDA);
        const auto contents = at::randn({which.numel(), tokens, heads, dimension}, half());
        for (std::size_t plane = 0; plane < twin_.size(); ++plane) {
            auto elastic = memory_.kv().planes()[plane], plain = twin_[plane];
            elastic.index_put_({which}, contents);
            plain.index_put_({which}, contents);
        }
    }

    void next(std::mt19937& random, StepInputs& in) {
        std::shuffle(sequences_.begin(), sequences_.end(), random);
        std::vector<std::int64_t> tables, written;
        for (std::size_t i = 0; i < batch; ++i) {
            // Rows may repeat sequences, but no block is written twice.
            const auto& blocks = sequences_[i % sequences_.size()];
            tables.insert(tables.end(), blocks.begin(), blocks.end());
            written.push_back(static_cast<std::int64_t>(blocks[(i / sequences_.size()) % table]));
        }
        in.table.copy_(at::tensor(tables, at::kLong).view({batch, table}));
        in.block.copy_(at::tensor(written, at::kLong));
        in.offset.random_(tokens);
        in.value.normal_();
        in.query.normal_();
    }

    [[nodiscard]] std::size_t size() const { return sequences_.size(); }

private:
    template <class Which>
    void leave(Which&& which) {
        for (auto sequence = sequences_.begin(); sequence != sequences_.end();) {
            if (!which(*sequence)) {
                ++sequence;
                continue;
            }
            memory_.free(*sequence);
            sequence = sequences_.erase(sequence);
        }
    }

    ServingMemory& memory_;
    const std::vector<at::Tensor>& twin_;
    std::vector<std::vector<std::uint64_t>> sequences_;
};

TEST_F(Lending, RandomTrafficIsThatOfPlainTensorsAndWithTheCheckOffItIsNot) {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    const Model model;
    KvTensors kv(*device_, kv_options(2, Traffic::heads, Traffic::dimension, 4096,
                                      KvLayout::by_block, 2 * MiB));
    std::vector<at::Tensor> twin;
    for (const auto& plane : kv.planes()) {
        twin.push_back(at::zeros(plane.sizes(), plane.options()));
    }
    SharedVmmAllocator arena(*device_, pages_of(2 * MiB)), plain(*device_);
    StepInputs in(Traffic::batch, Traffic::table, Traffic::heads, Traffic::dimension);
    kv.commit({0, 32});
    kv.before(raw());
    cudaDeviceSynchronize();
    at::Tensor output, expected;
    auto decode = capture(arena, raw(), [&] { output = attend(kv.planes(), in); });
    auto decode_plain = capture(plain, raw(), [&] { expected = attend(twin, in); });
    auto steps = shapes(arena, model, {64, 8});
    MemoryOptions options;
    options.kv_bytes = 8 * MiB;
    options.arena_keeps = arena.mapped_size();
    options.free_blocks = {16, 64};
    options.stream = raw();
    auto prompts = shapes(arena, model, {4096, 2048});
    ServingMemory memory(kv, arena, options);
    memory.pool().back({0, 32});
    Traffic traffic(memory, twin);
    std::mt19937 random(5);
    const auto wrong = at::zeros({2}, numbers());
    const auto wrong_steps = wrong[0], wrong_prompts = wrong[1];
    std::uint64_t refused = 0, prefills = 0, by_replay = 0;
    const auto step = [&](bool check) {
        memory.step();
        traffic.churn(random, 320);
        ASSERT_GT(traffic.size(), 0U);
        traffic.next(random, in);
        decode.replay(raw());
        decode_plain.replay(raw());
        wrong_steps.add_(at::ne(output, expected).any());
        auto& other = steps[random() % steps.size()];
        other.output.zero_();
        other.graph.replay(raw());
        wrong_steps.add_(at::ne(other.output, other.expected).any());
        if (random() % 32 != 0) {
            return;
        }
        auto& prompt = prompts[random() % prompts.size()];
        prompt.output.zero_();
        ++prefills;
        if (!check) {
            ASSERT_EQ(cudaGraphLaunch(static_cast<cudaGraphExec_t>(prompt.graph.exec()),
                                      stream_->stream()),
                      cudaSuccess);
            return;
        }
        if (!vmmgraph::leases(prompt.graph.space()).empty()) {
            try {
                prompt.graph.replay(raw());
            } catch (const vmmgraph::Error& error) {
                refused += error.status() == VMMGRAPH_ERROR_WRONG_STATE;
            }
            if (random() % 2 == 0) {
                memory.recall();
            } else {
                // The replay recalls only the leases over its pages.
                vmmgraph::set_recall(arena, 10s);
                ++by_replay;
            }
        }
        prompt.graph.replay(raw());
        vmmgraph::set_recall(arena, 0s);
        wrong_prompts.add_(at::ne(prompt.output, prompt.expected).any());
    };
    const long most = setting("VMMGRAPH_LENDING_STEPS", 10'000);
    const auto start = Clock::now();
    for (long i = 0; i < most; ++i) {
        step(true);
        ASSERT_FALSE(HasFatalFailure());
    }
    cudaDeviceSynchronize();
    const auto took = millis_since(start);
    const auto wrong_with = wrong_steps.item<std::int64_t>(),
               prompts_with = wrong_prompts.item<std::int64_t>();
    const auto stats = memory.stats();
    std::printf(
        "RESULT lending: %ld random steps and %llu prompts in %.1f s, %lld wrong steps, %lld wrong "
        "prompts; %llu leases of %.1f MiB in "
        "all, "
        "%.1f MiB at most; %llu replays refused, %llu recalled by a replay, %llu by the engine\n",
        most, static_cast<unsigned long long>(prefills), took / 1e3,
        static_cast<long long>(wrong_with), static_cast<long long>(prompts_with),
        static_cast<unsigned long long>(stats.leases), static_cast<double>(stats.lent_bytes) / MiB,
        static_cast<double>(stats.most_lent_bytes) / MiB, static_cast<unsigned long long>(refused),
        static_cast<unsigned long long>(by_replay), static_cast<unsigned long long>(stats.recalls));
    EXPECT_EQ(wrong_with, 0);
    EXPECT_EQ(prompts_with, 0);
    EXPECT_GT(refused, 0U);
    EXPECT_GT(by_replay, 0U);
    EXPECT_GT(stats.recalls, 0U);
    EXPECT_GT(stats.most_lent_bytes, 32 * MiB);

    wrong.zero_();
    prefills = 0;
    for (int i = 0; i < 400; ++i) {
        step(false);
        ASSERT_FALSE(HasFatalFailure());
    }
    cudaDeviceSynchronize();
    std::printf(
        "RESULT lending: 400 random steps and %llu prompts with the check off: %lld wrong steps\n",
        static_cast<unsigned long long>(prefills),
        static_cast<long long>(wrong_steps.item<std::int64_t>()));
    EXPECT_GT(wrong_steps.item<std::int64_t>(), 0);
}

}  // namespace
}  // namespace torch_tests
