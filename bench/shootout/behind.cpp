// Captures behind the traffic, measured with the shoot-out model and its 65 shapes: the first step,
// the steps while captures run, the time until all shapes exist, a second start, and traffic under
// a limit of graphs. Takes about two minutes on an H200. Exit status 77: no GPU.
//
//   behind [--layers N] [--slice-us N] [--hours N] [--only PART] [--beside 1] [--cudnn 0]
//          [--host 1] [--seconds N]
//
// --only runs one part: first, ahead, starts or day, which all run by default; or one of these:
//   eager    the first eager steps of a process
//   parts    durations within a capture, by shape
//   control  steps of stock torch while a second thread captures
//   beside   the same over an arena
//
// --seconds N ends `starts` after about N seconds (20), and prints what is missing then.
// --beside 1 records on a second thread (ExecutorOptions::record_beside).
// --cudnn 0 uses no attention of cuDNN, which makes a plan for every new shape on every thread.
// --host 1 checks this program without a GPU: a small model on the CPU, whose graphs rerun the
// body.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/engine.hpp>

#include "model.hpp"
#include "parts.hpp"

namespace {

using namespace vmmgraph::engine;
using shootout::at_share;
using shootout::Clock;
using shootout::Model;
using shootout::ms_since;
using shootout::Options;
using shootout::Shape;

Key key_of(const Shape& shape) {
    return Key::of(static_cast<std::uint32_t>(shape.tokens), 0, shape.decode ? uniform_decode : 0);
}

// State of the program, printed once a second. Ends the program if it takes far too long.
struct Progress {
    std::atomic<const char*> doing{"makes the model"};
    std::atomic<std::size_t> steps{0};
    std::atomic<std::size_t> graphs{0};
    // Size of the shape in recording, negative for prefills; 0 if none.
    std::atomic<std::int64_t> recorded{0};

    void print_until(double seconds) {
        std::thread([this, seconds] {
            for (int second = 1;; ++second) {
                std::this_thread::sleep_for(std::chrono::seconds(1));
                std::printf("%d s: %s, %zu steps, %zu graphs, records %lld\n", second, doing.load(),
                            steps.load(), graphs.load(), static_cast<long long>(recorded.load()));
                if (second > seconds) {
                    std::printf("RESULT cut after %d s: %s, %zu graphs, records %lld\n", second,
                                doing.load(), graphs.load(),
                                static_cast<long long>(recorded.load()));
                    std::_Exit(1);
                }
            }
        }).detach();
    }
};

Progress progress;

// An engine over the model: one executor for all shapes.
class Engine {
public:
    Engine(Model& model, const Options& options, const ExecutorOptions& given,
           std::optional<c10::cuda::CUDAStream> stream)
        : model_(model),
          stream_(stream),
          arena_(stream ? std::make_shared<vmmgraph::SharedVmmAllocator>(0) : nullptr) {
        auto executor = given;
        for (const auto tokens : options.decode) {
            executor.full.push_back(key_of({true, tokens}));
        }
        for (const auto tokens : options.prefill) {
            executor.full.push_back(key_of({false, tokens}));
        }
        executor.modes = {
            {{Mode::full, Mode::eager}, {Mode::full, Mode::eager}, {Mode::full, Mode::eager}}};
        inputs_ = std::make_unique<GraphInputs>(
            std::vector<Input>{
                Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)})},
            executor.full, InputsOptions{model.ids.device(), 512});
        executor_ = std::make_unique<GraphExecutor>(
            arena_, *inputs_,
            [this](Recorder& recorder) {
                const Shape shape{(recorder.bucket().variant & uniform_decode) != 0,
                                  recorder.bucket()[Axis::tokens]};
                progress.recorded = shape.decode ? shape.tokens : -shape.tokens;
                model_.ids.narrow(0, 0, shape.tokens).copy_(inputs_->tokens());
                model_.forward(shape);
                progress.recorded = 0;
            },
            executor);
    }

    // Launches a step; the device may still run the step afterwards.
    Ran launch(const Shape& shape, const std::vector<std::int64_t>& tokens) {
        const Step step{key_of(shape), shape.decode ? Phase::decode : Phase::prefill, true,
                        nullptr};
        const Value value(tokens.data(), {static_cast<std::uint32_t>(shape.tokens)});
        return executor_->run(
            step, {{names::tokens, value}}, [&] { eager(shape, tokens); },
            stream_ ? stream_->stream() : nullptr);
    }
    void eager(const Shape& shape, const std::vector<std::int64_t>& tokens) {
        const auto host =
            at::from_blob(const_cast<std::int64_t*>(tokens.data()), {shape.tokens}, at::kLong);
        model_.ids.narrow(0, 0, shape.tokens).copy_(host);
        model_.forward(shape);
    }
    void wait() const {
        if (stream_) {
            stream_->synchronize();
        }
    }
    GraphExecutor& graphs() { return *executor_; }
    [[nodiscard]] std::size_t arena_bytes() const { return arena_ ? arena_->mapped_size() : 0; }

private:
    Model& model_;
    // None on a CPU.
    std::optional<c10::cuda::CUDAStream> stream_;
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena_;
    std::unique_ptr<GraphInputs> inputs_;
    std::unique_ptr<GraphExecutor> executor_;
};

// Random steps: mostly decodes of any size, one prefill in twenty. Equal seeds give equal steps.
class Traffic {
public:
    Traffic(const Options& options, unsigned seed)
        : options_(options), random_(seed), tokens_(8192) {
        for (auto& token : tokens_) {
            token = pick(0, options.vocabulary - 1);
        }
    }
    // Sizes in a window around `center`, of all decode sizes, if not negative.
    Shape next(std::int64_t center = -1) {
        if (pick(0, 19) == 0) {
            const auto most =
                center < 0 ? static_cast<std::int64_t>(options_.prefill.size()) - 1 : 3;
            const auto bucket = options_.prefill[static_cast<std::size_t>(pick(0, most))];
            return {false, bucket - pick(0, bucket / 8)};
        }
        const auto most = options_.decode.back();
        return {true, center < 0 ? pick(1, most)
                                 : std::clamp<std::int64_t>(center + pick(-40, 40), 1, most)};
    }
    [[nodiscard]] const std::vector<std::int64_t>& tokens() const { return tokens_; }

private:
    std::int64_t pick(std::int64_t from, std::int64_t to) {
        return from +
               static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(to - from + 1));
    }
    const Options& options_;
    std::mt19937_64 random_;
    std::vector<std::int64_t> tokens_;
};

// The smallest listed size of a step.
std::int64_t bucket_of(const Options& options, const Shape& shape) {
    const auto& sizes = shape.decode ? options.decode : options.prefill;
    return *std::lower_bound(sizes.begin(), sizes.end(), shape.tokens) * (shape.decode ? 1 : -1);
}

struct Done {
    std::int64_t bucket;
    double ms;
    bool by_graph;
};

// Runs steps until `ends`, each with between_steps() while the device runs the step.
template <class Ends>
std::vector<Done> serve(Engine& engine, const Options& options, Traffic& traffic,
                        std::chrono::microseconds slice, double& longest, Ends&& ends) {
    std::vector<Done> done;
    std::size_t waiting = 1;
    while (!ends(done, waiting)) {
        const auto shape = traffic.next();
        const auto start = Clock::now();
        progress.doing = "launches a step";
        const auto ran = engine.launch(shape, traffic.tokens());
        if (slice.count() > 0) {
            const auto begin = Clock::now();
            progress.doing = "captures between steps";
            waiting = engine.graphs().between_steps(slice);
            longest = std::max(longest, ms_since(begin));
        }
        progress.doing = "waits for a step";
        engine.wait();
        progress.graphs = engine.graphs().stats().graphs;
        ++progress.steps;
        done.push_back({bucket_of(options, shape), ms_since(start), ran.mode != Mode::eager});
    }
    return done;
}

double share_by_graphs(const std::vector<Done>& steps) {
    const auto graphs =
        std::count_if(steps.begin(), steps.end(), [](const Done& step) { return step.by_graph; });
    return 100.0 * static_cast<double>(graphs) /
           static_cast<double>(std::max<std::size_t>(steps.size(), 1));
}

// Compares the logits of each shape's graph with those of an eager run of the same shape.
int wrong_graphs(Engine& engine, Model& model, const Options& options,
                 const std::vector<std::int64_t>& tokens, int& compared) {
    int wrong = 0;
    const auto check = [&](const Shape& shape) {
        if (engine.launch(shape, tokens).mode == Mode::eager) {
            return;
        }
        const auto by_graph = model.logits.narrow(0, 0, shape.rows()).clone();
        engine.eager(shape, tokens);
        const auto expected = model.logits.narrow(0, 0, shape.rows());
        const auto most = expected.abs().max().item<double>();
        wrong += (by_graph - expected).abs().max().item<double>() > options.tolerance * most;
        ++compared;
    };
    for (const auto tokens_of : options.decode) {
        check({true, tokens_of});
    }
    for (const auto tokens_of : options.prefill) {
        check({false, tokens_of});
    }
    return wrong;
}

// Objects and settings common to all parts.
struct Bench {
    Options options;
    std::chrono::microseconds slice{1000};
    int hours = 24;
    double seconds = 20;
    bool host = false;
    std::string only;
    std::optional<c10::cuda::CUDAStream> stream;
    std::unique_ptr<Model> model;
    ExecutorOptions behind;

    [[nodiscard]] std::size_t shapes() const {
        return options.decode.size() + options.prefill.size();
    }
    [[nodiscard]] bool runs(const char* part) const { return only.empty() || only == part; }
};

constexpr Shape probe{true, 64};

// The time from an executor to its first step's result.
void first_step(Bench& bench) {
    Traffic traffic(bench.options, 1);
    // Loads kernels and library handles, as an engine's profile run does.
    Engine engine(*bench.model, bench.options, {}, bench.stream);
    for (int i = 0; i < 5; ++i) {
        engine.eager(probe, traffic.tokens());
        engine.wait();
    }
    std::vector<double> eager;
    for (int i = 0; i < 20; ++i) {
        const auto start = Clock::now();
        engine.eager(probe, traffic.tokens());
        engine.wait();
        eager.push_back(ms_since(start));
    }
    if (!bench.runs("first")) {
        return;
    }
    const auto start = Clock::now();
    Engine served(*bench.model, bench.options, bench.behind, bench.stream);
    const auto created = ms_since(start);
    served.launch(probe, traffic.tokens());
    served.wait();
    const auto all = ms_since(start);
    std::printf(
        "RESULT first step: %.2f ms after the weights, of which %.2f ms make the executor; an "
        "eager step %.2f ms (%.2f x)\n",
        all, created, at_share(eager, 0.5), (all - created) / at_share(eager, 0.5));
}

// The time to capture every shape before the first step.
void ahead(Bench& bench) {
    const auto start = Clock::now();
    Engine engine(*bench.model, bench.options, {}, bench.stream);
    const auto graphs = engine.graphs().warm_up();
    engine.wait();
    std::printf("RESULT ahead: %zu graphs after %.2f s, without a step\n", graphs,
                ms_since(start) / 1e3);
}

// Steps of traffic, by bucket.
using Medians = std::map<std::int64_t, double>;

Medians medians_of(const std::vector<Done>& steps) {
    std::map<std::int64_t, std::vector<double>> of_bucket;
    for (const auto& step : steps) {
        of_bucket[step.bucket].push_back(step.ms);
    }
    Medians medians;
    for (auto& [bucket, values] : of_bucket) {
        medians[bucket] = at_share(std::move(values), 0.5);
    }
    return medians;
}

// Prints the steps for which `counts` returns true, over the medians of their shapes.
template <class Counts>
void print_ratios(const std::string& name, const std::vector<Done>& steps, const Medians& medians,
                  Counts&& counts) {
    std::vector<double> ratios;
    for (const auto& step : steps) {
        if (const auto found = medians.find(step.bucket); found != medians.end() && counts(step)) {
            ratios.push_back(step.ms / found->second);
        }
    }
    std::printf("RESULT %s: median %.3f, p99 %.3f, longest %.3f x of %zu\n", name.c_str(),
                at_share(ratios, 0.5), at_share(ratios, 0.99), at_share(ratios, 1), ratios.size());
}

bool any(const Done&) { return true; }
bool by_graph(const Done& step) { return step.by_graph; }
bool eagerly(const Done& step) { return !step.by_graph; }

// Runs each shape a few times, by its graph or eagerly. Every further size would make a plan in
// cuDNN, 50 ms each.
Medians medians_of_all(Engine& engine, const Options& options,
                       const std::vector<std::int64_t>& tokens, bool eagerly) {
    std::vector<Done> steps;
    const auto add = [&](const Shape& shape) {
        for (int i = 0; i < 3; ++i) {
            const auto start = Clock::now();
            const bool graph = !eagerly && engine.launch(shape, tokens).mode != Mode::eager;
            if (eagerly) {
                engine.eager(shape, tokens);
            }
            engine.wait();
            if (graph != eagerly) {
                steps.push_back({bucket_of(options, shape), ms_since(start), graph});
            }
        }
    };
    progress.doing = eagerly ? "runs each shape eagerly" : "runs each graph";
    for (const auto size : options.decode) {
        add({true, size});
    }
    for (const auto size : options.prefill) {
        add({false, size});
    }
    return medians_of(steps);
}

// Prints the shapes which ran never by a graph.
void print_missing(const char* name, const Bench& bench, const std::vector<Done>& steps) {
    std::map<std::int64_t, bool> ran;
    for (const auto& step : steps) {
        ran[step.bucket] |= step.by_graph;
    }
    std::string missing;
    const auto add = [&](std::int64_t bucket) {
        if (const auto found = ran.find(bucket); found == ran.end() || !found->second) {
            missing += " " + std::to_string(bucket) + (found == ran.end() ? " (no step)" : "");
        }
    };
    std::for_each(bench.options.decode.begin(), bench.options.decode.end(), add);
    for (const auto size : bench.options.prefill) {
        add(-size);
    }
    std::printf("RESULT %s: cut; no step by a graph of%s\n", name, missing.c_str());
}

// Runs steps of the same traffic as starts() eagerly.
std::vector<Done> eager_steps(Bench& bench, std::size_t count) {
    Engine engine(*bench.model, bench.options, {}, bench.stream);
    Traffic traffic(bench.options, 7);
    std::vector<Done> steps;
    while (steps.size() < count) {
        const auto shape = traffic.next();
        const auto start = Clock::now();
        engine.eager(shape, traffic.tokens());
        engine.wait();
        steps.push_back({bucket_of(bench.options, shape), ms_since(start), false});
    }
    return steps;
}

// The first eager steps of a process, when libraries know none of the shapes.
void eager(Bench& bench) {
    const auto cold = eager_steps(bench, 150);
    print_ratios("first eager steps of a process, over the median of their shape", cold,
                 medians_of(eager_steps(bench, 700)), any);
}

// Steps while all shapes are captured, at a first start and at one with the first one's histogram.
int starts(Bench& bench) {
    const auto begin = Clock::now();
    Traffic tokens(bench.options, 7);
    std::vector<std::pair<std::string, std::vector<Done>>> all;
    Medians by_graphs;
    int wrong = 0;
    for (const char* const name : {"first start", "second start"}) {
        const double most = bench.seconds * 1e3 * (all.empty() ? 0.6 : 0.85);
        Engine engine(*bench.model, bench.options, bench.behind, bench.stream);
        double longest = 0;
        Traffic traffic(bench.options, 7);
        const auto start = Clock::now();
        const auto during = serve(engine, bench.options, traffic, bench.slice, longest,
                                  [&](const auto& done, std::size_t waiting) {
                                      return ms_since(begin) > most ||
                                             (waiting == 0 && done.size() > 100 &&
                                              engine.graphs().stats().graphs == bench.shapes());
                                  });
        const auto seconds = ms_since(start) / 1e3;
        const auto graphs = static_cast<std::size_t>(engine.graphs().stats().graphs);
        std::vector<double> decodes;
        for (const auto& step : during) {
            if (step.bucket > 0) {
                decodes.push_back(step.ms);
            }
        }
        std::printf(
            "RESULT %s: %zu of %zu shapes after %.2f s and %zu steps of traffic; %.1f %% of these "
            "steps by graphs\n",
            name, graphs, bench.shapes(), seconds, during.size(), share_by_graphs(during));
        std::printf(
            "RESULT %s: decodes %.2f ms median, %.2f p99, %.2f longest; longest gap %.2f ms\n",
            name, at_share(decodes, 0.5), at_share(decodes, 0.99), at_share(decodes, 1), longest);
        if (graphs < bench.shapes()) {
            print_missing(name, bench, during);
        }
        if (all.empty()) {
            by_graphs = medians_of_all(engine, bench.options, tokens.tokens(), false);
        }
        print_ratios(std::string(name) + ", all steps, over the median of their graph", during,
                     by_graphs, any);
        print_ratios(std::string(name) + ", steps by graphs, over the median of their graph",
                     during, by_graphs, by_graph);
        all.emplace_back(name, during);
        if (all.size() == 2) {
            progress.doing = "compares the graphs";
            int compared = 0;
            wrong = wrong_graphs(engine, *bench.model, bench.options, tokens.tokens(), compared);
            std::printf("RESULT %s: %d of %d graphs wrong\n", name, wrong, compared);
        }
    }
    Engine engine(*bench.model, bench.options, {}, bench.stream);
    const auto medians = medians_of_all(engine, bench.options, tokens.tokens(), true);
    for (const auto& [name, during] : all) {
        print_ratios(name + ", eager steps, over the median of their shape", during, medians,
                     eagerly);
    }
    return wrong > 0 ? 1 : 0;
}

// A day of traffic under a limit of graphs: the decode size rises until noon and falls again.
int day(Bench& bench) {
    auto limited = bench.behind;
    limited.histogram.clear();
    limited.most_graphs = static_cast<std::uint32_t>(bench.shapes() / 2);
    Engine engine(*bench.model, bench.options, limited, bench.stream);
    Traffic traffic(bench.options, 9);
    std::size_t steps = 0;
    std::size_t hits = 0;
    std::uint64_t most = 0;
    for (int hour = 0; hour < bench.hours; ++hour) {
        const auto of_day = hour % 24;
        const std::int64_t center = 20 + 40 * std::min(of_day, 24 - of_day);
        for (int i = 0; i < 500; ++i, ++steps) {
            hits += engine.launch(traffic.next(center), traffic.tokens()).mode != Mode::eager;
            engine.graphs().between_steps(bench.slice);
            engine.wait();
        }
        most = std::max<std::uint64_t>(most, engine.graphs().stats().graphs);
    }
    int compared = 0;
    const auto wrong =
        wrong_graphs(engine, *bench.model, bench.options, traffic.tokens(), compared);
    const auto stats = engine.graphs().stats();
    std::printf(
        "RESULT day: at most %u graphs: %llu existed at most, %.2f %% of %zu steps by graphs, "
        "%llu captures, %llu evictions, %d of %d graphs wrong, arena %.0f MiB\n",
        limited.most_graphs, static_cast<unsigned long long>(most),
        100.0 * static_cast<double>(hits) / static_cast<double>(steps), steps,
        static_cast<unsigned long long>(stats.captures),
        static_cast<unsigned long long>(stats.evictions), wrong, compared,
        static_cast<double>(engine.arena_bytes()) / (1 << 20));
    return wrong > 0 || most > limited.most_graphs ? 1 : 0;
}

int run(Bench& bench) {
    const c10::InferenceMode inference;
    if (!bench.host) {
        if (bench.only != "control") {
            vmmgraph::torch::install();
        }
        bench.stream = c10::cuda::getStreamFromPool(true, 0);
        c10::cuda::setCurrentCUDAStream(*bench.stream);
    }
    bench.model = std::make_unique<Model>(
        bench.options, bench.options.decode.back(), bench.options.prefill.back(),
        bench.host ? at::Device(at::kCPU) : at::Device(at::kCUDA, 0));
    if (bench.only == "control" || bench.only == "beside") {
        shootout::print_control(*bench.model, bench.options, *bench.stream,
                                bench.only == "control");
        return 0;
    }
    const auto file = std::string("/tmp/vmmgraph_behind_") + std::to_string(::getpid()) + ".json";
    bench.behind.captures = Captures::behind;
    bench.behind.histogram = file;
    first_step(bench);
    if (bench.only == "parts") {
        shootout::print_parts(*bench.model, bench.options, *bench.stream);
    }
    if (bench.only == "eager") {
        eager(bench);
    }
    if (bench.runs("ahead")) {
        ahead(bench);
    }
    std::remove(file.c_str());
    const int failed = bench.runs("starts") ? starts(bench) : 0;
    std::remove(file.c_str());
    return failed == 0 && bench.runs("day") ? day(bench) : failed;
}

}  // namespace

int main(int count, char** arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    Bench bench;
    auto& options = bench.options;
    for (int i = 1; i + 1 < count; i += 2) {
        const std::string name = arguments[i];
        const long value = std::atol(arguments[i + 1]);
        if (name == "--layers") {
            options.layers = value;
        } else if (name == "--slice-us") {
            bench.slice = std::chrono::microseconds(value);
        } else if (name == "--seconds") {
            bench.seconds = std::atof(arguments[i + 1]);
        } else if (name == "--hours") {
            bench.hours = static_cast<int>(value);
        } else if (name == "--only") {
            bench.only = arguments[i + 1];
        } else if (name == "--cudnn") {
            at::globalContext().setSDPUseCuDNN(value != 0);
        } else if (name == "--beside") {
            bench.behind.record_beside = value != 0;
        } else if (name == "--host") {
            bench.host = value != 0;
        } else {
            std::fprintf(stderr,
                         "cannot use %s: the options are --layers, --slice-us, --hours, --only, "
                         "--seconds, --beside, --cudnn and --host\n",
                         name.c_str());
            return 2;
        }
    }
    if (bench.host) {
        options.hidden = options.intermediate = 32;
        options.heads = options.kv_heads = 2;
        options.head_dim = options.context = 16;
        options.vocabulary = 100;
        options.layers = 1;
        options.prefill.resize(8);
    } else if (c10::cuda::device_count() == 0) {
        std::printf("SKIPPED: needs a GPU\n");
        return 77;
    }
    if (bench.only == "starts") {
        // The model takes a few seconds, and so do the last comparisons.
        progress.print_until(bench.seconds + 4);
    }
    return run(bench);
}
