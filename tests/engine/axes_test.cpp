// GraphExecutor over several axes: buckets on a grid of tokens, sequences, pages and adapters in
// four variants, with random traffic.
#include <cstdio>
#include <random>

#include "padded.hpp"

namespace engine_tests {
namespace {

constexpr std::int64_t vocabulary = 100;
constexpr std::int64_t width = 32;
// Variant bit: the step has adapters.
constexpr std::uint32_t lora = 2;

// A step on the host; adapter weights and addends are on the device.
struct Traffic {
    Step step;
    float bias = 0;
    std::vector<at::Tensor> values;
    // Cloned on the stream.
    Ran ran;
    at::Tensor hidden, sums;
    std::vector<at::Tensor> seen;
};

Traffic random_step(std::mt19937& random) {
    const auto pick = [&](std::int64_t from, std::int64_t to) {
        return from +
               static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
    };
    const bool decode = pick(0, 1) == 0;
    const bool adapted = pick(0, 1) == 0;
    // Sometimes exceeds all buckets.
    const auto batch = pick(1, decode ? 10 : 16);
    const auto tokens = decode ? batch : pick(batch, 66);
    const auto pages = pick(1, pick(0, 7) == 0 ? 140 : 40);
    const auto adapters = adapted ? pick(1, 4) : pick(0, 1);
    Traffic made;
    made.step.key.variant = (decode ? uniform_decode : 0) | (adapted ? lora : 0);
    made.step.key.extents = {static_cast<std::uint32_t>(tokens), static_cast<std::uint32_t>(batch),
                             static_cast<std::uint32_t>(pages),
                             static_cast<std::uint32_t>(adapters)};
    made.step.phase = decode ? Phase::decode : Phase::mixed;
    // Full graphs run no eager work per step.
    made.bias = decode ? 0 : static_cast<float>(pick(0, 9));
    const auto some = [](c10::ScalarType dtype, std::int64_t below, at::IntArrayRef shape) {
        return at::randint(0, below, shape, dtype);
    };
    made.values = {some(at::kLong, vocabulary, {tokens}),
                   some(at::kLong, batch, {tokens}),
                   some(at::kInt, pages, {tokens}),
                   some(at::kInt, std::max<std::int64_t>(1, adapters), {tokens}),
                   at::rand({batch}),
                   at::arange(0, 3 * batch + 1, 3, at::kInt),
                   at::rand({pages}),
                   some(at::kInt, 1000, {batch, pages}),
                   at::rand({2 * adapters + 1}, at::kDouble),
                   at::randn({adapters, width}, on_device(at::kFloat)),
                   at::randn({tokens, width}, on_device(at::kFloat))};
    return made;
}

struct ModelOfAxes {
    at::Tensor table = at::randn({vocabulary, width}, on_device(at::kFloat));
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::unique_ptr<GraphInputs> inputs;
    std::unique_ptr<GraphExecutor> executor;
    // First output that copies an input.
    std::size_t first_seen = 0;

    static std::vector<Input> declaration() {
        const auto tokens = Extent::along(Axis::tokens);
        const auto batch = Extent::along(Axis::batch);
        const auto pages = Extent::along(Axis::pages);
        const auto wide = Extent::fixed(width);
        std::vector<Input> all{
            Input::host(names::tokens, at::kLong, {tokens}),
            Input::host("owner", at::kLong, {tokens}, Pad::repeat_last()),
            Input::host("page", at::kInt, {tokens}, Pad::value(1)),
            Input::host("adapter", at::kInt, {tokens}),
            Input::host("scale", at::kFloat, {batch}, Pad::value(0.5)),
            Input::host("starts", at::kInt, {Extent::along(Axis::batch, 1, 1)}, Pad::repeat_last()),
            Input::host("page_values", at::kFloat, {pages}, Pad::repeat_last()),
            Input::host(names::block_tables, at::kInt, {batch, pages}, Pad::value(-7)),
            Input::host("ends", at::kDouble, {Extent::along(Axis::other, 2, 1)}, Pad::value(-3)),
            Input::device("adapters", at::kFloat, {Extent::along(Axis::other), wide}),
            Input::device("added", at::kFloat, {tokens, wide}, Pad::repeat_last()),
        };
        const auto inputs = all;
        all.push_back(Input::output(names::hidden_states, at::kFloat, {tokens, wide}));
        all.push_back(Input::output("sums", at::kFloat, {batch}));
        for (const auto& input : inputs) {
            all.push_back(Input::output("seen " + input.name, input.dtype, input.shape));
        }
        return all;
    }

    explicit ModelOfAxes(const ExecutorOptions& options) {
        if (has_gpu()) {
            vmmgraph::torch::install();
            arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
        }
        auto buckets = options.full;
        buckets.insert(buckets.end(), options.piecewise.begin(), options.piecewise.end());
        inputs =
            std::make_unique<GraphInputs>(declaration(), buckets, InputsOptions{device(), 512});
        first_seen = inputs->find("sums") + 1;
        wait();
        executor = std::make_unique<GraphExecutor>(
            arena, *inputs, [this](Recorder& recorder) { body(recorder); }, options);
    }

    // Combines rows of all axes.
    [[nodiscard]] at::Tensor gathered(const at::Tensor& tokens, const at::Tensor& owner,
                                      const at::Tensor& page, const at::Tensor& scale,
                                      const at::Tensor& page_values) const {
        return table.index_select(0, tokens) * scale.index_select(0, owner).unsqueeze(1) +
               page_values.index_select(0, page).unsqueeze(1);
    }

    void body(Recorder& recorder) {
        const auto& all = *inputs;
        const auto rows = gathered(all.tokens(), all.get("owner"), all.get("page"),
                                   all.get("scale"), all.get("page_values"));
        const auto biased = at::empty_like(rows);
        recorder.eager({rows, biased}, [](const Step& step, at::TensorList tensors) {
            const auto* const bias = static_cast<const float*>(step.params);
            const auto real =
                bias == nullptr ? tensors[0].size(0) : std::int64_t{step.key[Axis::tokens]};
            tensors[1]
                .narrow(0, 0, real)
                .copy_(tensors[0].narrow(0, 0, real) + (bias == nullptr ? 0.0 : double{*bias}));
        });
        all.hidden_states().copy_(biased + all.get("adapters").index_select(0, all.get("adapter")) +
                                  all.get("added"));
        // A later piece, which may reuse memory.
        recorder.eager({}, [](const Step&, at::TensorList) {});
        all.get("sums").copy_(sums_of(all.get("scale"), all.get("starts")));
        for (std::size_t i = 0; first_seen + i < all.inputs().size(); ++i) {
            all.get(first_seen + i).copy_(all.get(i));
        }
    }

    static at::Tensor sums_of(const at::Tensor& scale, const at::Tensor& starts) {
        return scale * 2 +
               (starts.narrow(0, 1, scale.size(0)) - starts.narrow(0, 0, scale.size(0)));
    }

    // Without padding.
    [[nodiscard]] std::pair<at::Tensor, at::Tensor> eager(const Traffic& of) const {
        std::vector<at::Tensor> v;
        for (const auto& value : of.values) {
            v.push_back(value.to(device()));
        }
        auto hidden = gathered(v[0], v[1], v[2], v[4], v[6]) + double{of.bias};
        if (v[9].size(0) > 0) {
            hidden = hidden + v[9].index_select(0, v[3]);
        }
        return {hidden + v[10], sums_of(v[4], v[5])};
    }
};

std::vector<Key> grid(std::uint32_t variant,
                      const std::vector<std::array<std::uint32_t, 2>>& tokens_and_batch,
                      const std::vector<std::uint32_t>& pages,
                      const std::vector<std::uint32_t>& adapters) {
    std::vector<Key> keys;
    for (const auto& [tokens, batch] : tokens_and_batch) {
        for (const auto of_pages : pages) {
            for (const auto other : adapters) {
                keys.push_back({variant, {tokens, batch, of_pages, other}});
            }
        }
    }
    return keys;
}

ExecutorOptions on_a_grid() {
    ExecutorOptions options;
    options.modes[static_cast<std::size_t>(Phase::decode)] = {Mode::full, Mode::piecewise};
    options.full = grid(uniform_decode, {{1, 1}, {2, 2}, {4, 4}, {8, 8}}, {16, 128}, {1});
    const auto adapted = grid(uniform_decode | lora, {{1, 1}, {4, 4}, {8, 8}}, {16, 128}, {1, 4});
    options.full.insert(options.full.end(), adapted.begin(), adapted.end());
    options.piecewise = grid(0, {{16, 4}, {16, 16}, {64, 4}, {64, 16}}, {32, 128}, {1});
    const auto mixed = grid(lora, {{16, 4}, {16, 16}, {64, 16}}, {32, 128}, {4});
    options.piecewise.insert(options.piecewise.end(), mixed.begin(), mixed.end());
    return options;
}

bool covers(const Key& bucket, const Key& key) {
    bool covered = bucket.variant == key.variant;
    for (std::size_t i = 0; i < key.extents.size(); ++i) {
        covered = covered && bucket.extents[i] >= key.extents[i];
    }
    return covered;
}

std::pair<Mode, std::vector<Key>> candidates(const ExecutorOptions& options, const Step& step) {
    std::vector<Key> found;
    const auto look = [&](const std::vector<Key>& buckets, const Key& key) {
        std::copy_if(buckets.begin(), buckets.end(), std::back_inserter(found),
                     [&](const Key& bucket) { return covers(bucket, key); });
        return !found.empty();
    };
    if (step.phase == Phase::decode && look(options.full, step.key)) {
        return {Mode::full, found};
    }
    auto any = step.key;
    any.variant &= ~uniform_decode;
    return {look(options.piecewise, any) ? Mode::piecewise : Mode::eager, found};
}

// Returns an error, or empty.
std::string wrong_dispatch(const ExecutorOptions& options, const Traffic& done) {
    const auto [mode, buckets] = candidates(options, done.step);
    if (done.ran.mode != mode) {
        return "another mode";
    }
    if (mode == Mode::eager) {
        return done.ran.reason == Reason::too_large ? "" : "another reason";
    }
    if (std::find(buckets.begin(), buckets.end(), done.ran.bucket) == buckets.end()) {
        return "a bucket that does not cover it";
    }
    for (const auto& bucket : buckets) {
        if (bucket[Axis::tokens] < done.ran.bucket[Axis::tokens] ||
            (bucket != done.ran.bucket && covers(done.ran.bucket, bucket))) {
            return "not by the lightest bucket";
        }
    }
    const bool exact = done.ran.bucket.extents == done.step.key.extents;
    const bool says_so = done.ran.reason == Reason::captured ||
                         done.ran.reason == (exact ? Reason::hit : Reason::padded);
    return says_so ? "" : "another reason";
}

// Returns an error, or empty.
std::string wrong_result(const ModelOfAxes& model, const Traffic& done) {
    const auto [hidden, sums] = model.eager(done);
    if (!at::equal(done.hidden, hidden)) {
        return "hidden states";
    }
    if (!at::equal(done.sums, sums)) {
        return "sums";
    }
    for (std::size_t i = 0; i < done.seen.size(); ++i) {
        const auto& input = model.inputs->inputs()[i];
        const auto seen = done.seen[i].cpu();
        if (!at::equal(seen, padded(input, done.values[i].cpu(), seen.sizes()))) {
            return "input " + input.name;
        }
    }
    return "";
}

// Without waits. `ahead`: prepares each step while the previous one may run.
void run_traffic(const ExecutorOptions& options, ModelOfAxes& model, bool ahead, const char* name) {
    const int steps = most_steps(400);
    const OnStream on;
    std::mt19937 random(31);
    std::vector<Traffic> all;
    for (int i = 0; i < steps; ++i) {
        all.push_back(random_step(random));
    }
    const auto prepare = [&](std::size_t i) {
        all[i].step.params = &all[i].bias;
        model.executor->prepare(all[i].step, named(model.inputs->inputs(), all[i].values));
    };
    int eager = 0;
    std::uint64_t most = 0;
    prepare(0);
    for (std::size_t i = 0; i < all.size(); ++i) {
        auto& now = all[i];
        now.ran = model.executor->launch([&] { ++eager; }, stream());
        if (now.ran.mode != Mode::eager) {
            ASSERT_EQ(model.inputs->bucket(), now.ran.bucket);
            now.hidden = model.inputs->hidden_states(now.step.key[Axis::tokens]).clone();
            now.sums = model.inputs->get("sums", now.step.key[Axis::batch]).clone();
            for (std::size_t n = 0; n < model.first_seen - 2; ++n) {
                now.seen.push_back(model.inputs->get(model.first_seen + n).clone());
            }
        }
        if (!ahead) {
            wait();
        }
        if (i + 1 < all.size()) {
            prepare(i + 1);
        }
        most = std::max(most, model.executor->stats().graphs);
    }
    wait();
    int wrong = 0;
    std::array<int, 4> by_mode{};
    for (std::size_t i = 0; i < all.size(); ++i) {
        ++by_mode.at(static_cast<std::size_t>(all[i].ran.mode));
        auto why = wrong_dispatch(options, all[i]);
        if (why.empty() && all[i].ran.mode != Mode::eager) {
            why = wrong_result(model, all[i]);
        }
        wrong += !why.empty();
        EXPECT_EQ(why, "") << "step " << i;
    }
    const auto stats = model.executor->stats();
    std::printf(
        "RESULT axes, %s: %zu buckets, %d steps: full %d, piecewise %d, eager %d; %llu captures, "
        "%llu evictions, at most %llu graphs; "
        "%d wrong\n",
        name, options.full.size() + options.piecewise.size(), steps, by_mode[VMMGRAPH_MODE_FULL],
        by_mode[VMMGRAPH_MODE_PIECEWISE], by_mode[VMMGRAPH_MODE_EAGER],
        static_cast<unsigned long long>(stats.captures),
        static_cast<unsigned long long>(stats.evictions), static_cast<unsigned long long>(most),
        wrong);
    EXPECT_EQ(by_mode[VMMGRAPH_MODE_EAGER], eager);
    EXPECT_EQ(model.executor->unplanned(), 0u);
    EXPECT_EQ(stats.failures, 0u) << model.executor->last_failure();
    EXPECT_TRUE(by_mode[VMMGRAPH_MODE_FULL] > 100 || shortened());
    EXPECT_TRUE(by_mode[VMMGRAPH_MODE_PIECEWISE] > 100 || shortened());
    EXPECT_LE(most, options.most_graphs == 0 ? options.full.size() + options.piecewise.size()
                                             : options.most_graphs);
}

TEST(Axes, TrafficOnAGridIsRight) {
    const auto options = on_a_grid();
    ModelOfAxes model(options);
    run_traffic(options, model, false, "on demand");
}

TEST(Axes, PreparedAheadToo) {
    const auto options = on_a_grid();
    ModelOfAxes model(options);
    const auto buckets = options.full.size() + options.piecewise.size();
    EXPECT_EQ(model.executor->warm_up(), buckets);
    const auto bytes = model.arena ? model.arena->mapped_size() : 0;
    run_traffic(options, model, true, "warm, prepared ahead");
    EXPECT_EQ(model.executor->stats().captures, buckets);
    EXPECT_EQ(model.arena ? model.arena->mapped_size() : 0, bytes) << "memory is flat";
}

TEST(Axes, WithFewGraphsToo) {
    auto options = on_a_grid();
    options.most_graphs = 6;
    ModelOfAxes model(options);
    run_traffic(options, model, false, "6 graphs at most");
    EXPECT_TRUE(model.executor->stats().evictions > 100 || shortened());
}

// Evicts just-launched graphs.
TEST(Axes, WithFewGraphsAndPreparedAheadToo) {
    auto options = on_a_grid();
    options.most_graphs = 6;
    ModelOfAxes model(options);
    run_traffic(options, model, true, "6 graphs at most, prepared ahead");
    EXPECT_TRUE(model.executor->stats().evictions > 100 || shortened());
}

}  // namespace
}  // namespace engine_tests
