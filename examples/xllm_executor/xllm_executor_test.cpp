// Compares greedy decoding with graphs to eager decoding, token by token. Sequences join and leave;
// prefills run piecewise, decodes by full graphs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

#include "../../tests/engine/devices.hpp"
#include "scheduler.hpp"

namespace xllm_example {
namespace {

using namespace vmmgraph::engine;
using engine_tests::has_gpu;
using engine_tests::most_steps;

// Doubles if steps with different numbers of rows are compared: products may be computed in a
// different order, and rounding must not change a token.
ModelArgs small_model(c10::ScalarType dtype = at::kDouble) {
    ModelArgs args;
    args.options = engine_tests::on_device(dtype);
    if (!has_gpu()) {
        args.hidden = 64;
        args.heads = 4;
        args.head_dim = 16;
        args.intermediate = 96;
        args.vocabulary = 200;
    }
    return args;
}

struct Engine {
    const Decoder& model;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::vector<KVCache> caches;
    CudaGraphExecutorImpl executor;
    Scheduler scheduler;
    // Hidden states of the last step, valid until the next; may have padding after the tokens'
    // rows.
    at::Tensor hidden;
    std::int64_t tokens_of_step = 0;

    Engine(const Decoder& model, const Options& options)
        : model(model),
          arena(make_arena()),
          caches(model.make_caches()),
          executor(model, arena, options),
          scheduler(model.args(), options.max_seqs_per_batch, 11) {}

    at::Tensor eager(const ForwardInput& input) {
        return executor.eager(input.token_ids, input.positions, caches, input.input_params);
    }

    static std::shared_ptr<vmmgraph::SharedVmmAllocator> make_arena() {
        if (!has_gpu()) {
            return nullptr;
        }
        vmmgraph::torch::install();
        return std::make_shared<vmmgraph::SharedVmmAllocator>(0);
    }

    template <class Run>
    std::vector<std::int64_t> step_by(Run&& run) {
        const auto input = scheduler.next();
        const engine_tests::OnStream guard;
        hidden = run(input.to(model.args().options.device()));
        tokens_of_step = input.token_ids.size(0);
        return take(hidden);
    }

    std::vector<std::int64_t> take(const at::Tensor& of) {
        const auto rows = at::tensor(scheduler.rows(), at::kLong).to(of.device());
        const auto tokens = model.greedy(of.index_select(0, rows)).cpu();
        std::vector<std::int64_t> next(tokens.const_data_ptr<std::int64_t>(),
                                       tokens.const_data_ptr<std::int64_t>() + tokens.numel());
        scheduler.take(next);
        return next;
    }

    std::vector<std::int64_t> step(Ran& ran) {
        return step_by([&](const ForwardInput& input) {
            const auto output =
                executor.run(input.token_ids, input.positions, caches, input.input_params);
            ran = output.ran;
            return output.hidden_states;
        });
    }
};

struct Outcome {
    std::size_t tokens = 0;
    std::size_t wrong = 0;
    std::array<std::size_t, 4> by_mode{};
};

Outcome compare(
    Engine& graphs, Engine& eager, int steps, const std::function<void()>& behind_each = [] {}) {
    Outcome outcome;
    for (int step = 0; step < steps; ++step) {
        Ran ran;
        Ran planned;
        const auto got = graphs.step(ran);
        const auto expected = eager.step(planned);
        EXPECT_EQ(planned.reason, Reason::mode_eager);
        EXPECT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size() && i < expected.size(); ++i) {
            outcome.wrong += got[i] != expected[i];
        }
        outcome.tokens += got.size();
        ++outcome.by_mode.at(static_cast<std::size_t>(ran.mode));
        behind_each();
    }
    return outcome;
}

Options options_of(bool graph) {
    Options options;
    options.enable_graph = graph;
    options.max_seqs_per_batch = has_gpu() ? 64 : 12;
    // Fewer than in an engine, to force evictions.
    options.graph.executables = {2, 0};
    return options;
}

// Memory of the device, without torch's own allocator, which grows with the shapes of eager work.
std::size_t device_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    if (!has_gpu() || cudaMemGetInfo(&free, &total) != cudaSuccess) {
        return 0;
    }
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    return total - free - static_cast<std::size_t>(stats.reserved_bytes[0].current);
}

TEST(XllmExecutor, DecodesTokenForTokenAsEager) {
    const Decoder model(small_model());
    Engine graphs(model, options_of(true));
    Engine eager(model, options_of(false));
    const auto there = graphs.executor.warm_up(graphs.caches);
    const auto arena_bytes = graphs.arena ? graphs.arena->mapped_size() : 0;
    const auto first = compare(graphs, eager, most_steps(has_gpu() ? 100 : 20));
    engine_tests::wait();
    const auto bytes = device_bytes();
    std::size_t most = bytes;
    const auto outcome = compare(graphs, eager, most_steps(has_gpu() ? 500 : 120),
                                 [&] { most = std::max(most, device_bytes()); });
    const auto& executor = graphs.executor.graphs();
    std::printf(
        "RESULT decode: %zu graphs, %zu + %zu tokens, %zu wrong; steps full %zu, piecewise %zu, "
        "eager %zu; %zu joined, %zu left; "
        "arena %zu bytes before and %zu after, device %zu MiB before and at most %zu MiB\n",
        there, first.tokens, outcome.tokens, first.wrong + outcome.wrong,
        outcome.by_mode[VMMGRAPH_MODE_FULL], outcome.by_mode[VMMGRAPH_MODE_PIECEWISE],
        outcome.by_mode[VMMGRAPH_MODE_EAGER], graphs.scheduler.joined(), graphs.scheduler.left(),
        arena_bytes, graphs.arena ? graphs.arena->mapped_size() : 0, bytes >> 20, most >> 20);
    EXPECT_EQ(first.wrong + outcome.wrong, 0u);
    EXPECT_EQ(executor.unplanned(), 0u);
    EXPECT_EQ(outcome.by_mode[VMMGRAPH_MODE_EAGER], 0u);
    if (has_gpu() && !engine_tests::shortened()) {
        EXPECT_LE(executor.executables().instantiated, 2u);
        EXPECT_GT(executor.executables().evictions, 10u);
    }
    EXPECT_EQ(executor.stats().captures, there);
    EXPECT_EQ(graphs.arena ? graphs.arena->mapped_size() : 0, arena_bytes)
        << "memory is flat after the largest shape";
    if (!engine_tests::shortened()) {
        EXPECT_GT(outcome.by_mode[VMMGRAPH_MODE_FULL], 0u);
        EXPECT_GT(outcome.by_mode[VMMGRAPH_MODE_PIECEWISE], 0u);
        EXPECT_GT(graphs.scheduler.left(), has_gpu() ? 64u : 12u);
        // Kernels used first by a later eager shape are loaded in between.
        EXPECT_LE(most, bytes + (std::size_t{64} << 20)) << "memory of the device is flat";
    }
    graphs.executor.graphs().clear();
    if (graphs.arena) {
        EXPECT_EQ(graphs.arena->stats().spaces, 0u);
        EXPECT_EQ(graphs.arena->stats().blocks, 0u);
        EXPECT_EQ(graphs.arena->mapped_size(), 0u) << "pages return with the graphs";
    }
    EXPECT_NE(executor.prometheus().find(
                  "vmmgraph_dispatch_steps_total{mode=\"eager\",reason=\"too_large\"} 0\n"),
              std::string::npos);
}

// Serves from the first step; captures run between steps, while the device may still be busy.
TEST(XllmExecutor, StartsAtOnceAndCapturesBehindTheTraffic) {
    using Clock = std::chrono::steady_clock;
    const auto ms_since = [](Clock::time_point start) {
        return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    };
    const Decoder model(small_model());
    auto options = options_of(true);
    options.graph.captures = Captures::behind;
    Ran ran;
    // Loads the kernels. Equal seeds give equal steps.
    Engine eager(model, options_of(false));
    eager.step(ran);
    const auto start = Clock::now();
    Engine graphs(model, options);
    graphs.step(ran);
    const auto first_ms = ms_since(start);
    EXPECT_EQ(ran.mode, Mode::eager);
    std::vector<double> eager_ms;
    std::vector<double> steady_ms;
    std::size_t wrong = 0;
    std::size_t captured_after = 0;
    const int steps = most_steps(has_gpu() ? 600 : 160);
    for (int step = 1; step < steps; ++step) {
        const auto begin = Clock::now();
        const auto got = graphs.step(ran);
        engine_tests::wait();
        (ran.mode == Mode::eager ? eager_ms : steady_ms).push_back(ms_since(begin));
        if (graphs.executor.graphs().between_steps(std::chrono::microseconds(500)) > 0) {
            captured_after = static_cast<std::size_t>(step) + 1;
        }
        Ran planned;
        const auto expected = eager.step(planned);
        for (std::size_t i = 0; i < got.size(); ++i) {
            wrong += got[i] != expected[i];
        }
    }
    const auto median = [](std::vector<double> of) {
        std::nth_element(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2),
                         of.end());
        return of.empty() ? 0.0 : of[of.size() / 2];
    };
    const auto& executor = graphs.executor.graphs();
    std::printf(
        "RESULT start: first step's tokens %.2f ms after the start of the executor; %zu eager "
        "steps of %.2f ms, then %zu steps by graphs "
        "of %.2f ms; the last of %zu graphs after step %zu; %zu wrong\n",
        first_ms, eager_ms.size(), median(eager_ms), steady_ms.size(), median(steady_ms),
        static_cast<std::size_t>(executor.stats().graphs), captured_after, wrong);
    EXPECT_EQ(wrong, 0u);
    if (!engine_tests::shortened()) {
        EXPECT_GT(executor.stats().graphs, 4u);
        EXPECT_LT(eager_ms.size(), steady_ms.size());
    }
}

// Pads the step to its bucket's shape. Attention between pieces ignores padding sequences.
ForwardInput padded(ForwardInput input, const Key& bucket, std::int64_t blocks_of_sequence) {
    auto& device = input.input_params.attention.device;
    const auto longer = [](const at::Tensor& of, std::int64_t length) {
        return at::constant_pad_nd(of, {0, length - of.size(-1)});
    };
    for (auto* const tensor : {&input.token_ids, &input.positions, &device.new_cache_slots}) {
        *tensor = longer(*tensor, bucket[Axis::tokens]);
    }
    if (input.input_params.meta.batch_forward_type == Phase::decode) {
        const std::int64_t batch = bucket[Axis::batch];
        const auto missing = batch - input.input_params.meta.num_sequences;
        device.block_tables = at::constant_pad_nd(
            device.block_tables, {0, blocks_of_sequence - device.block_tables.size(1), 0, missing});
        device.kv_seq_lens =
            at::cat({device.kv_seq_lens, device.kv_seq_lens.narrow(0, -1, 1).expand({missing})});
    }
    return input;
}

// With equal numbers of rows, graph and eager products are equal bit for bit, in the dtype of
// engines.
TEST(XllmExecutor, DecodesBitForBitAsEagerAtTheBucketsShape) {
    const auto dtype = has_gpu() ? at::kBFloat16 : at::kFloat;
    const Decoder model(small_model(dtype));
    Engine graphs(model, options_of(true));
    Engine eager(model, options_of(false));
    graphs.executor.warm_up(graphs.caches);
    Outcome outcome;
    const int steps = most_steps(320);
    int equal = 0;
    for (int step = 0; step < steps; ++step) {
        Ran ran;
        const auto got = graphs.step(ran);
        ++outcome.by_mode.at(static_cast<std::size_t>(ran.mode));
        const auto expected = eager.step_by([&](const ForwardInput& input) {
            EXPECT_EQ(ran.mode, input.input_params.meta.batch_forward_type == Phase::decode
                                    ? Mode::full
                                    : Mode::piecewise);
            return eager.eager(padded(input, ran.bucket, model.args().blocks_of_sequence));
        });
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
            outcome.wrong += got[i] != expected[i];
        }
        outcome.tokens += got.size();
        equal += at::equal(graphs.hidden, eager.hidden.narrow(0, 0, eager.tokens_of_step));
    }
    std::printf(
        "RESULT decode at the bucket's shape, %s: %zu tokens, %zu wrong; %d of %d steps bitwise "
        "equal; steps full %zu, piecewise %zu; "
        "%zu joined, %zu left\n",
        c10::toString(dtype), outcome.tokens, outcome.wrong, equal, steps,
        outcome.by_mode[VMMGRAPH_MODE_FULL], outcome.by_mode[VMMGRAPH_MODE_PIECEWISE],
        graphs.scheduler.joined(), graphs.scheduler.left());
    EXPECT_EQ(outcome.wrong, 0u);
    EXPECT_EQ(equal, steps);
    for (std::size_t layer = 0; layer < graphs.caches.size(); ++layer) {
        // Block 0 is reserved for padding, and padding rows race for it.
        const auto blocks = [](const at::Tensor& of) { return of.narrow(0, 1, of.size(0) - 1); };
        EXPECT_TRUE(at::equal(blocks(graphs.caches[layer].k), blocks(eager.caches[layer].k)))
            << "keys of layer " << layer;
        EXPECT_TRUE(at::equal(blocks(graphs.caches[layer].v), blocks(eager.caches[layer].v)))
            << "values of layer " << layer;
    }
    if (!engine_tests::shortened()) {
        EXPECT_GT(outcome.by_mode[VMMGRAPH_MODE_FULL], 0u);
        EXPECT_GT(outcome.by_mode[VMMGRAPH_MODE_PIECEWISE], 0u);
        EXPECT_GT(graphs.scheduler.left(), has_gpu() ? 64u : 12u);
    }
}

// Compares paged and batched decoding with recomputing a single sequence from its first token.
TEST(XllmExecutor, ThePagedDecoderIsTheDecoder) {
    const auto args = small_model();
    const Decoder model(args);
    Engine engine(model, options_of(false));
    auto scheduler = engine.scheduler;
    int checked = 0;
    for (int step = 0; step < most_steps(30); ++step) {
        const auto input = scheduler.next();
        const auto hidden = engine.eager(input);
        const auto& lengths = input.input_params.attention.host;
        for (std::size_t i = 0; i + 1 < lengths.q_seq_lens.size() && step % 7 == 0; ++i) {
            const auto row = lengths.q_seq_lens[i + 1] - 1;
            const auto length = lengths.kv_seq_lens[i + 1] - lengths.kv_seq_lens[i];
            ForwardInput alone;
            alone.token_ids = at::tensor(scheduler.tokens_of(i), at::kInt);
            alone.positions = at::arange(length, at::kInt);
            auto& params = alone.input_params;
            params.meta = {Phase::prefill, 1};
            params.attention.host = {{0, length}, {0, length}};
            params.attention.device.new_cache_slots =
                at::arange(args.block_size, args.block_size + length, at::kInt);
            params.attention.device.block_tables =
                at::arange(1, args.blocks_of_sequence + 1, at::kInt).view({1, -1});
            const auto whole = engine.executor.eager(alone.token_ids, alone.positions,
                                                     model.make_caches(), params);
            EXPECT_TRUE(at::allclose(whole[length - 1], hidden[row], 1e-9, 1e-9))
                << "step " << step << ", sequence " << i;
            ++checked;
        }
        const auto rows = at::tensor(scheduler.rows(), at::kLong).to(hidden.device());
        const auto tokens = model.greedy(hidden.index_select(0, rows)).cpu();
        scheduler.take({tokens.const_data_ptr<std::int64_t>(),
                        tokens.const_data_ptr<std::int64_t>() + tokens.numel()});
    }
    EXPECT_GT(checked, 3);
}

// Captures on demand, with fewer graphs than shapes.
TEST(XllmExecutor, WithHalfTheGraphsTokensAreTheSame) {
    const Decoder model(small_model());
    auto options = options_of(true);
    options.graph.most_graphs = 4;
    Engine graphs(model, options);
    Engine eager(model, options_of(false));
    std::uint64_t most = 0;
    const auto outcome = compare(graphs, eager, most_steps(has_gpu() ? 200 : 60), [&] {
        most = std::max(most, graphs.executor.graphs().stats().graphs);
    });
    EXPECT_EQ(outcome.wrong, 0u);
    EXPECT_EQ(graphs.executor.graphs().unplanned(), 0u);
    EXPECT_LE(most, 4u);
    EXPECT_TRUE(graphs.executor.graphs().stats().evictions > 0 || engine_tests::shortened());
}

// Positions [3, tokens], and embeddings in some steps: one graph for steps with and one for steps
// without.
TEST(XllmExecutor, AMultiModalModelDecodesAsEager) {
    auto args = small_model();
    args.multimodal = true;
    const Decoder model(args);
    Engine graphs(model, options_of(true));
    Engine eager(model, options_of(false));
    std::array<int, 2> embedded{};
    const auto outcome = compare(graphs, eager, most_steps(has_gpu() ? 200 : 60), [&] {
        const auto& bucket = graphs.executor.inputs().bucket();
        ++embedded[(bucket.variant & with_embedding) != 0 ? 1 : 0];
    });
    EXPECT_EQ(outcome.wrong, 0u);
    EXPECT_EQ(outcome.by_mode[VMMGRAPH_MODE_EAGER], 0u);
    EXPECT_EQ(graphs.executor.graphs().unplanned(), 0u);
    EXPECT_TRUE((embedded[0] > 0 && embedded[1] > 0) || engine_tests::shortened());
}

// Two data-parallel ranks know the token counts of both in each step and run graphs of one shape,
// also if one has no tokens.
TEST(XllmExecutor, RanksPadToTheLargestAndAgreeOnTheMode) {
    const Decoder model(small_model());
    std::array<Engine, 2> ranks{Engine(model, options_of(true)), Engine(model, options_of(true))};
    std::array<Engine, 2> eager{Engine(model, options_of(false)), Engine(model, options_of(false))};
    ranks[1].scheduler = Scheduler(model.args(), options_of(true).max_seqs_per_batch, 29);
    std::array<int, 4> by_mode{};
    int idle = 0;
    for (int step = 0; step < most_steps(60); ++step) {
        std::array<ForwardInput, 2> inputs;
        ModelInputParams all;
        for (std::size_t rank = 0; rank < 2; ++rank) {
            if (rank == 1 && step % 5 == 0) {
                // The rank has no tokens, but takes part in the step.
                inputs[rank] = {at::empty({0}, at::kInt), at::empty({0}, at::kInt), {}};
                ++idle;
            } else {
                inputs[rank] = ranks[rank].scheduler.next();
            }
            all.parallel.dp_global_token_nums.push_back(
                static_cast<std::int32_t>(inputs[rank].token_ids.size(0)));
            all.parallel.dp_is_decode.push_back(inputs[rank].input_params.meta.batch_forward_type ==
                                                Phase::decode);
        }
        std::array<Ran, 2> ran;
        for (std::size_t rank = 0; rank < 2; ++rank) {
            inputs[rank].input_params.parallel = all.parallel;
            const auto given = inputs[rank].to(model.args().options.device());
            const engine_tests::OnStream guard;
            const auto output = ranks[rank].executor.run(given.token_ids, given.positions,
                                                         ranks[rank].caches, given.input_params);
            ran[rank] = output.ran;
            ASSERT_EQ(output.hidden_states.size(0), given.token_ids.size(0));
            if (given.token_ids.size(0) > 0) {
                const auto expected = eager[rank].eager(given);
                EXPECT_TRUE(at::allclose(output.hidden_states, expected, 1e-9, 1e-9))
                    << "rank " << rank << ", step " << step;
                ranks[rank].take(expected);
            }
        }
        EXPECT_EQ(ran[0].mode, ran[1].mode) << "step " << step;
        EXPECT_EQ(ran[0].bucket, ran[1].bucket) << "step " << step;
        for (const auto tokens : all.parallel.dp_global_token_nums) {
            EXPECT_GE(ran[0].bucket[Axis::tokens], static_cast<std::uint32_t>(tokens))
                << "step " << step;
        }
        ++by_mode.at(static_cast<std::size_t>(ran[0].mode));
    }
    EXPECT_EQ(by_mode[VMMGRAPH_MODE_EAGER], 0);
    EXPECT_TRUE(
        (by_mode[VMMGRAPH_MODE_FULL] > 0 && by_mode[VMMGRAPH_MODE_PIECEWISE] > 0 && idle > 0) ||
        engine_tests::shortened());
}

}  // namespace
}  // namespace xllm_example
