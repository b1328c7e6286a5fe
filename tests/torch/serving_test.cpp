// One memory budget for a decoder's activations and KV cache, on a GPU: concurrent sequences when
// the cache borrows pages between long prompts, compared with fixed splits. Both use the example's
// scheduler.
//
// `VMMGRAPH_SERVING_REQUESTS` sets the requests (default 1,200).
#include "long_decoder.hpp"

#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <stdexcept>

#include "../../examples/xllm_executor/server.hpp"

namespace torch_tests {
namespace {

using Clock = std::chrono::steady_clock;
using xllm_example::MemoryOptions;
using xllm_example::MemoryStats;
using xllm_example::Request;
using xllm_example::Server;
using xllm_example::ServerStats;
using xllm_example::ServingMemory;

constexpr std::uint64_t page_bytes = 8 * MiB;

struct Served {
    std::map<std::uint64_t, std::vector<std::int32_t>> done;
    ServerStats stats;
    MemoryStats memory;
    double seconds = 0;
    std::uint64_t activations = 0, graphs = 0, kv = 0, most = 0, copied = 0;

    [[nodiscard]] double at_once() const {
        return static_cast<double>(stats.full_decoded) /
               static_cast<double>(std::max<std::uint64_t>(stats.full_steps, 1));
    }
};

class Serving : public RoomyElastic {
protected:
    // Short prompts with long answers, and occasional long prompts.
    static std::vector<Request> requests(std::uint64_t count) {
        std::vector<Request> made;
        for (std::uint64_t id = 0; id < count; ++id) {
            std::mt19937_64 random(id);
            const auto pick = [&](std::int64_t from, std::int64_t to) {
                return from + static_cast<std::int64_t>(random() %
                                                        static_cast<std::uint64_t>(to - from + 1));
            };
            const bool is_long = id % 200 == 150;
            const auto prompt =
                is_long ? longest_prompt - 8192 * static_cast<std::int64_t>(id / 200 % 3)
                        : pick(32, short_prompt);
            Request request{
                id, {}, prompt + (is_long ? pick(16, 64) : pick(64, short_tokens - short_prompt))};
            for (std::int64_t i = 0; i < prompt; ++i) {
                request.prompt.push_back(
                    static_cast<std::int32_t>(pick(0, Decoder::vocabulary - 1)));
            }
            made.push_back(std::move(request));
        }
        return made;
    }

    // `spare`: the fraction a split adds to the activations' size. Negative: pages are lent.
    Served serve(const Decoder& decoder, const std::vector<Request>& requests, std::uint64_t budget,
                 double spare) {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        device_->trim();
        const bool lending = spare < 0;
        KvTensorOptions kv_options{
            {2 * Decoder::layers,
             KvPlane{{tokens, Decoder::kv_heads, Decoder::dimension}, at::kBFloat16}},
            budget / (256 * 1024),
            KvLayout::by_block,
            {}};
        kv_options.memory.name = "kv";
        kv_options.memory.page_bytes = page_bytes;
        vmmgraph::ArenaOptions arena_options;
        arena_options.large_page_bytes = page_bytes;
        SharedVmmAllocator arena(*device_, arena_options);
        KvTensors kv(*device_, kv_options);
        const auto a_page = kv.cache().stats().blocks_a_page;
        kv.commit({0, a_page});
        kv.before(raw());
        for (auto plane : kv.planes()) {
            // Read by padding rows.
            plane.narrow(0, 0, 1).zero_();
        }
        Engine engine(decoder, arena, kv, *stream_);
        engine.warm_up();
        cudaDeviceSynchronize();
        Served served;
        served.graphs = engine.graph_bytes();
        served.activations = arena.mapped_size();
        // Other prompt lengths may need slightly more.
        const auto set_aside = lending ? static_cast<double>(served.activations) * 1.02
                                       : static_cast<double>(served.activations) * (1 + spare);
        if (set_aside + 1.1 * GiB > static_cast<double>(budget)) {
            ADD_FAILURE() << "activations take " << served.activations / MiB << " MiB of "
                          << budget / MiB;
            return served;
        }
        MemoryOptions options;
        options.kv_bytes =
            (budget - static_cast<std::uint64_t>(set_aside)) / page_bytes * page_bytes;
        options.arena_keeps = served.graphs;
        options.lending = lending;
        options.free_blocks = {a_page, 4 * a_page};
        options.stream = raw();
        served.kv = options.kv_bytes;
        device_->set_budget(budget);
        {
            ServingMemory memory(kv, arena, options);
            memory.pool().back({0, a_page});
            if (memory.allocate(1) != std::vector<std::uint64_t>{0}) {
                throw std::runtime_error("block 0 is somebody's");
            }
            Server server(
                memory,
                {[&](Sequence& sequence) { return engine.prefill(sequence); },
                 [&](const std::vector<Sequence*>& sequences) { return engine.decode(sequences); },
                 [](const Request& request) {
                     return static_cast<std::int64_t>(request.prompt.size()) > short_prompt;
                 }},
                {tokens, 4096, 32, static_cast<std::int64_t>(budget / (256 * 1024))});
            for (const auto& request : requests) {
                server.submit(request);
            }
            const auto start = Clock::now();
            while (server.step()) {
                served.most = std::max<std::uint64_t>(served.most, device_->stats().physical_bytes);
                if (std::chrono::duration<double>(Clock::now() - start).count() > 60) {
                    throw std::runtime_error("no end within a minute");
                }
            }
            cudaDeviceSynchronize();
            served.seconds = std::chrono::duration<double>(Clock::now() - start).count();
            served.done = server.done();
            served.stats = server.stats();
            served.memory = memory.stats();
            served.copied = server.host_bytes();
        }
        device_->set_budget(0);
        return served;
    }
};

void print(const char* how, const Served& served, std::uint64_t budget) {
    std::printf(
        "RESULT serving, %s, %.0f MiB: activations %.0f MiB (graphs of every step %.0f), KV pages "
        "of its own %.0f, lent at most %.0f, %.0f "
        "in all at "
        "most; %.1f sequences decoded at once on average while others waited, %llu at most; %llu "
        "steps, %llu tokens in %.1f s (%.0f a "
        "second); %llu long prompts, %llu leases (%.1f ms for %.0f MiB), %llu recalls (%.1f ms), "
        "%llu times a sequence stepped aside, %.0f "
        "MiB copied\n",
        how, static_cast<double>(budget) / MiB, static_cast<double>(served.activations) / MiB,
        static_cast<double>(served.graphs) / MiB, static_cast<double>(served.kv) / MiB,
        static_cast<double>(served.memory.most_lent_bytes) / MiB,
        static_cast<double>(served.most) / MiB, served.at_once(),
        static_cast<unsigned long long>(served.stats.most_at_once),
        static_cast<unsigned long long>(served.stats.steps),
        static_cast<unsigned long long>(served.stats.decoded), served.seconds,
        static_cast<double>(served.stats.decoded) / served.seconds,
        static_cast<unsigned long long>(served.stats.long_prefills),
        static_cast<unsigned long long>(served.memory.leases), served.memory.lend_micros / 1e3,
        static_cast<double>(served.memory.lent_bytes) / MiB,
        static_cast<unsigned long long>(served.memory.recalls), served.memory.recall_micros / 1e3,
        static_cast<unsigned long long>(served.stats.paused),
        static_cast<double>(served.copied) / MiB);
    std::fflush(stdout);
}

TEST_F(Serving, UnderOneBudgetMoreSequencesAreDecodedAtOnceThanUnderTheBestSplit) {
    const auto budget = static_cast<std::uint64_t>(setting("VMMGRAPH_SERVING_MIB", 4096)) * MiB;
    const Decoder decoder;
    const auto requests =
        this->requests(static_cast<std::uint64_t>(setting("VMMGRAPH_SERVING_REQUESTS", 1'200)));
    cudaDeviceSynchronize();
    const auto elastic = serve(decoder, requests, budget, -1);
    print("elastic", elastic, budget);
    double best = 0;
    std::size_t wrong = 0, compared = 0;
    for (const double spare : {0.0, 0.15}) {
        const auto split = serve(decoder, requests, budget, spare);
        print(spare == 0 ? "split, tight" : "split, 15 % spare", split, budget);
        best = std::max(best, split.at_once());
        ASSERT_EQ(split.done.size(), requests.size());
        for (const auto& [id, expected] : split.done) {
            const auto found = elastic.done.find(id);
            compared += expected.size();
            for (std::size_t i = 0; i < expected.size(); ++i) {
                wrong += found == elastic.done.end() || i >= found->second.size() ||
                         found->second[i] != expected[i];
            }
        }
    }
    std::printf(
        "RESULT serving: %.3f x the best split's sequences at once, %zu tokens compared, %zu "
        "wrong\n",
        elastic.at_once() / best, compared, wrong);
    EXPECT_EQ(elastic.done.size(), requests.size());
    EXPECT_EQ(wrong, 0U);
    EXPECT_LE(elastic.most, budget);
    EXPECT_GE(elastic.at_once(), 1.5 * best);
}

}  // namespace
}  // namespace torch_tests
