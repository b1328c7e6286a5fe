// Serving under one budget: long prompts are prefilled eagerly in the arena, and the KV cache
// borrows the arena's pages in between. The tokens must equal those of serving without lending.
#include <cstdio>
#include <cstring>
#include <random>

#include <vmmgraph/torch_eager.hpp>

#include "../../tests/engine/devices.hpp"
#include "server.hpp"
#include "executor.hpp"

namespace xllm_example {
namespace {

using engine_tests::has_gpu;
using vmmgraph::Device;
using vmmgraph::SharedVmmAllocator;

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;

ModelArgs model_args() {
    ModelArgs args;
    args.options = engine_tests::on_device(at::kDouble);
    args.blocks_of_sequence = has_gpu() ? 64 : 16;
    if (!has_gpu()) {
        args.hidden = 64;
        args.heads = 4;
        args.head_dim = 16;
        args.intermediate = 96;
        args.vocabulary = 200;
    }
    return args;
}

std::uint64_t page_bytes() { return has_gpu() ? 2 * MiB : 64 * KiB; }

// Prompts by id, mostly short; every eighth has nearly the maximum length.
std::vector<Request> requests_of(const ModelArgs& args, std::uint64_t count) {
    const auto longest = args.blocks_of_sequence * args.block_size;
    std::vector<Request> requests;
    for (std::uint64_t id = 0; id < count; ++id) {
        std::mt19937_64 random(id);
        const auto pick = [&](std::int64_t from, std::int64_t to) {
            return from +
                   static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
        };
        const bool is_long = id % 8 == 7;
        Request request{id, {}, 0};
        const auto prompt = is_long ? pick(longest * 3 / 4, longest - 20) : pick(2, longest / 8);
        for (std::int64_t i = 0; i < prompt; ++i) {
            request.prompt.push_back(static_cast<std::int32_t>(pick(0, args.vocabulary - 1)));
        }
        request.wanted = prompt + (is_long ? pick(2, 10) : pick(longest / 8, longest / 4));
        requests.push_back(std::move(request));
    }
    return requests;
}

// Treatment of long prompts while pages are on lease.
enum class Check { recalls, refuses, off };

struct Result {
    std::map<std::uint64_t, std::vector<std::int32_t>> done;
    ServerStats stats;
    MemoryStats memory;
    std::uint64_t physical_bytes = 0;
    std::uint64_t budget_bytes = 0;
};

// Memory of activations. Without a GPU nothing is captured: a graph is a space, and each replay
// writes all of its bytes, as kernels may.
class Activations {
public:
    Activations(const Device& device, Check check) : check_(check) {
        vmmgraph::ArenaOptions options;
        options.small_page_bytes = has_gpu() ? 0 : 4 * KiB;
        options.large_page_bytes = page_bytes();
        arena_ = std::make_shared<SharedVmmAllocator>(device, options);
        if (!has_gpu()) {
            step_.emplace(open(256 * KiB, step_block_));
            long_.emplace(open(3 * MiB, long_block_));
        }
    }

    template <class Body>
    auto step(Body&& body) {
        return has_gpu() ? body() : replay(*step_, step_block_, 256 * KiB, body);
    }

    template <class Body>
    auto prompt(Body&& body) {
        if (has_gpu()) {
            const vmmgraph::torch::EagerScope scope(*arena_, engine_tests::stream());
            return body();
        }
        if (check_ == Check::off) {
            std::memset(long_block_, 0x5a, 3 * MiB);
            return body();
        }
        return replay(*long_, long_block_, 3 * MiB, body);
    }

    [[nodiscard]] std::shared_ptr<SharedVmmAllocator> arena() const { return arena_; }
    // Bytes of the graphs, if nothing else was allocated yet.
    [[nodiscard]] std::uint64_t of_graphs() const {
        return has_gpu() ? arena_->mapped_size() : 256 * KiB;
    }

private:
    vmmgraph::Space open(std::uint64_t bytes, void*& block) {
        auto space = arena_->open_space();
        block = space.allocate(bytes);
        space.free(block);
        space.seal();
        return space;
    }

    template <class Body>
    static auto replay(vmmgraph::Space& space, void* block, std::uint64_t bytes, Body&& body) {
        std::optional<decltype(body())> result;
        space.replay(nullptr, [&] {
            std::memset(block, 0x5a, bytes);
            result = body();
        });
        return std::move(*result);
    }

    Check check_;
    std::shared_ptr<SharedVmmAllocator> arena_;
    std::optional<vmmgraph::Space> step_, long_;
    void* step_block_ = nullptr;
    void* long_block_ = nullptr;
};

Result serve(const Decoder& model, const std::vector<Request>& requests, bool lending,
             Check check = Check::recalls) {
    const auto& args = model.args();
    auto device = [] {
        vmmgraph::DeviceOptions options;
        if (has_gpu()) {
            return Device::open(options);
        }
        options.driver = vmmgraph::DriverChoice::host;
        options.device = 7;
        options.host_granularity_bytes = 4 * KiB;
        options.host_memory_bytes = 64 * MiB;
        return Device::open(options);
    }();
    const engine_tests::OnStream guard;
    void* const stream = engine_tests::stream();
    if (has_gpu()) {
        vmmgraph::torch::install();
    }
    Activations activations(device, check);
    Result result;
    {
        const auto dtype = c10::typeMetaToScalarType(args.options.dtype());
        const vmmgraph::torch::KvPlane plane{{args.block_size, args.kv_heads, args.head_dim},
                                             dtype};
        vmmgraph::torch::KvTensorOptions kv_options{
            {static_cast<std::size_t>(2 * args.layers), plane},
            4096,
            vmmgraph::KvLayout::by_block,
            {}};
        kv_options.memory.name = "kv";
        kv_options.memory.page_bytes = page_bytes();
        vmmgraph::torch::KvTensors kv(device, kv_options);
        std::vector<KVCache> caches;
        for (std::size_t i = 0; i < kv.planes().size(); i += 2) {
            caches.push_back({kv.planes()[i], kv.planes()[i + 1]});
        }
        kv.commit({0, 1});
        kv.before(stream);

        Options options;
        options.max_seqs_per_batch = has_gpu() ? 64 : 32;
        options.max_tokens_for_graph = has_gpu() ? 256 : 64;
        CudaGraphExecutorImpl executor(model, has_gpu() ? activations.arena() : nullptr, options);
        executor.warm_up(caches);
        const auto graphs = activations.of_graphs();

        MemoryOptions memory_options;
        memory_options.kv_bytes =
            (has_gpu() ? 5 : 10) * static_cast<std::uint64_t>(args.blocks_of_sequence) *
                kv.cache().stats().block_bytes / 4 / page_bytes() * page_bytes() +
            2 * page_bytes();
        memory_options.arena_keeps = graphs;
        memory_options.lending = lending;
        memory_options.free_blocks = {4, static_cast<std::uint64_t>(args.blocks_of_sequence)};
        memory_options.stream = stream;
        ServingMemory memory(kv, *activations.arena(), memory_options);
        memory.pool().back({0, kv.cache().stats().blocks_a_page});
        kv.commit({0, kv.cache().stats().blocks_a_page});
        EXPECT_EQ(memory.allocate(1).value(), std::vector<std::uint64_t>{0});

        const auto greedy = [&](const at::Tensor& hidden, const std::vector<std::int64_t>& rows) {
            const auto tokens =
                model
                    .greedy(hidden.index_select(0, at::tensor(rows, at::kLong).to(hidden.device())))
                    .cpu();
            return std::vector<std::int64_t>(
                tokens.const_data_ptr<std::int64_t>(),
                tokens.const_data_ptr<std::int64_t>() + tokens.numel());
        };
        const auto by_graph = [&](const std::vector<Sequence*>& sequences) {
            const auto batch = make_batch(args, sequences);
            const auto input = batch.input.to(args.options.device());
            return activations.step([&] {
                return greedy(
                    executor.run(input.token_ids, input.positions, caches, input.input_params)
                        .hidden_states,
                    batch.rows);
            });
        };
        const auto is_long = [&](const Request& request) {
            return request.prompt.size() > options.max_tokens_for_graph;
        };
        const auto prefill = [&](Sequence& sequence) {
            if (sequence.tokens.size() <= options.max_tokens_for_graph) {
                return by_graph({&sequence}).front();
            }
            const auto batch = make_batch(args, {&sequence});
            const auto input = batch.input.to(args.options.device());
            return activations.prompt([&] {
                return greedy(executor.eager(input.token_ids, input.positions, caches,
                                             input.input_params),
                              batch.rows)
                    .front();
            });
        };
        // Run the longest prompt once, so the arena has its full size; the budget then allows no
        // more.
        Sequence longest{
            0,
            std::vector<std::int32_t>(
                static_cast<std::size_t>(args.blocks_of_sequence * args.block_size), 1),
            0,
            0,
            {}};
        const auto first =
            memory.allocate(static_cast<std::size_t>(args.blocks_of_sequence)).value();
        longest.blocks.assign(first.begin(), first.end());
        static_cast<void>(prefill(longest));
        memory.free(first);
        engine_tests::wait();
        result.budget_bytes = memory_options.kv_bytes + activations.arena()->mapped_size() +
                              (has_gpu() ? 8 * page_bytes() : 0);
        device.set_budget(result.budget_bytes);

        Server server(
            memory,
            {prefill, by_graph,
             [&](const Request& request) { return check == Check::recalls && is_long(request); }},
            {args.block_size, options.max_seqs_per_batch, 4, 2048});
        for (const auto& request : requests) {
            server.submit(request);
        }
        while (server.step()) {
            result.physical_bytes = std::max(result.physical_bytes, device.stats().physical_bytes);
        }
        result.done = server.done();
        result.stats = server.stats();
        result.memory = memory.stats();
        memory.free({0});
        executor.graphs().clear();
    }
    device.set_budget(0);
    return result;
}

double at_once(const ServerStats& stats) {
    return static_cast<double>(stats.full_decoded) /
           static_cast<double>(std::max<std::uint64_t>(stats.full_steps, 1));
}

TEST(Serving, OnBorrowedPagesTokensAreTheSameAndMoreAreDecodedAtOnce) {
    const Decoder model(model_args());
    const auto requests =
        requests_of(model.args(), static_cast<std::uint64_t>(engine_tests::most_steps(64)));
    const auto split = serve(model, requests, false);
    const auto elastic = serve(model, requests, true);
    ASSERT_EQ(split.done.size(), requests.size());
    ASSERT_EQ(elastic.done.size(), requests.size());
    std::size_t wrong = 0, tokens = 0;
    for (const auto& [id, expected] : split.done) {
        const auto& got = elastic.done.at(id);
        EXPECT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
            wrong += got[i] != expected[i];
        }
        tokens += expected.size();
    }
    std::printf(
        "RESULT serving: %zu requests, %zu tokens, %zu wrong; under %.1f MiB (%.1f there at most) "
        "%.1f at once where a split has %.1f, in "
        "%llu "
        "steps and %llu; %llu leases, %llu recalls, %.1f MiB lent at most, %llu times a sequence "
        "stepped aside\n",
        requests.size(), tokens, wrong, static_cast<double>(elastic.budget_bytes) / MiB,
        static_cast<double>(elastic.physical_bytes) / MiB, at_once(elastic.stats),
        at_once(split.stats), static_cast<unsigned long long>(elastic.stats.steps),
        static_cast<unsigned long long>(split.stats.steps),
        static_cast<unsigned long long>(elastic.memory.leases),
        static_cast<unsigned long long>(elastic.memory.recalls),
        static_cast<double>(elastic.memory.most_lent_bytes) / MiB,
        static_cast<unsigned long long>(elastic.stats.paused));
    EXPECT_EQ(wrong, 0u);
    EXPECT_LE(elastic.physical_bytes, elastic.budget_bytes);
    EXPECT_EQ(split.memory.leases, 0u);
    if (!engine_tests::shortened()) {
        EXPECT_GT(elastic.memory.recalls, 0u);
        EXPECT_GT(elastic.stats.paused, 0u);
        EXPECT_GT(elastic.stats.long_prefills, 0u);
        EXPECT_GT(at_once(elastic.stats), at_once(split.stats));
    }
}

TEST(Serving, ALongPromptThatRecallsNothingIsRefused) {
    const Decoder model(model_args());
    const auto refusal = engine_tests::refusal(
        [&] { serve(model, requests_of(model.args(), 64), true, Check::refuses); },
        VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(refusal.find("lease"), std::string::npos) << refusal;
}

// Shows the need for the refusal. On a GPU, the program that measures lending tests this with real
// graphs.
TEST(Serving, WithTheCheckOffTokensAreWrong) {
    if (has_gpu()) {
        GTEST_SKIP() << "of the host: nothing there writes activations unless a test does";
    }
    const Decoder model(model_args());
    const auto requests = requests_of(model.args(), 64);
    const auto right = serve(model, requests, false);
    const auto wrong = serve(model, requests, true, Check::off);
    EXPECT_NE(right.done, wrong.done);
}

}  // namespace
}  // namespace xllm_example
