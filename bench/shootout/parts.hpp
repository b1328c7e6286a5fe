// Parts of a capture by shape, and steps of one thread while another thread captures. Both are
// measured for stock torch and for this library.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/torch.hpp>

#include "model.hpp"

namespace shootout {

using Clock = std::chrono::steady_clock;

inline double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

inline double at_share(std::vector<double> values, double share) {
    if (values.empty()) {
        return 0;
    }
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1,
                           static_cast<std::size_t>(share * static_cast<double>(values.size())))];
}

// Durations of one graph in milliseconds, by part.
using Parts = std::map<std::string, double>;

// Calls `work` and adds its duration to a part.
template <class Work>
void timed(Parts& parts, const char* name, Work&& work) {
    const auto start = Clock::now();
    work();
    parts[name] += ms_since(start);
}

// Capture of one forward by stock torch, in a pool shared by all graphs.
class StockGraph {
public:
    StockGraph(Model& model, const Shape& shape, c10::cuda::CUDAStream stream,
               c10::MempoolId_t pool, Parts& parts)
        : graph_(std::make_unique<at::cuda::CUDAGraph>(true)) {
        const c10::cuda::CUDAStreamGuard current(stream);
        timed(parts, "begin",
              [&] { graph_->capture_begin(pool, cudaStreamCaptureModeThreadLocal); });
        timed(parts, "record", [&] { model.forward(shape); });
        timed(parts, "end", [&] { graph_->capture_end(); });
    }
    void instantiate(Parts& parts) {
        timed(parts, "instantiate", [&] { graph_->instantiate(); });
    }
    void replay(c10::cuda::CUDAStream) { graph_->replay(); }

private:
    std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

// Capture of one forward in an arena.
class ArenaGraph {
public:
    ArenaGraph(Model& model, const Shape& shape, c10::cuda::CUDAStream stream,
               vmmgraph::SharedVmmAllocator& arena, Parts& parts) {
        std::optional<vmmgraph::torch::CaptureScope> scope;
        timed(parts, "begin", [&] { scope.emplace(arena, stream.stream()); });
        timed(parts, "record", [&] { model.forward(shape); });
        timed(parts, "end", [&] { graph_.emplace(scope->end()); });
        parts["end_driver"] += static_cast<double>(graph_->report().driver_ns) / 1e6;
        timed(parts, "scope", [&] { scope.reset(); });
    }
    void instantiate(Parts& parts) {
        timed(parts, "instantiate", [&] { static_cast<void>(graph_->instantiate()); });
    }
    void upload(c10::cuda::CUDAStream stream, Parts& parts) {
        timed(parts, "upload", [&] {
            C10_CUDA_CHECK(
                cudaGraphUpload(static_cast<cudaGraphExec_t>(graph_->exec()), stream.stream()));
            stream.synchronize();
        });
    }
    void replay(c10::cuda::CUDAStream stream) { graph_->replay(stream.stream()); }
    void destroy(Parts& parts) {
        timed(parts, "destroy", [&] { graph_.reset(); });
    }

private:
    std::optional<vmmgraph::torch::CapturedGraph> graph_;
};

// Returns the row of the table that a shape belongs to.
inline std::string group_of(const Shape& shape) {
    const auto tokens = shape.tokens;
    return shape.decode ? (tokens <= 64    ? "decode   1..  64"
                           : tokens <= 256 ? "decode  65.. 256"
                                           : "decode 257.. 512")
                        : (tokens <= 512    ? "prefill   ..  512"
                           : tokens <= 2048 ? "prefill   .. 2048"
                                            : "prefill   .. 8192");
}

inline std::vector<Shape> all_shapes(const Options& options) {
    std::vector<Shape> shapes;
    for (const auto tokens : options.decode) {
        shapes.push_back({true, tokens});
    }
    for (const auto tokens : options.prefill) {
        shapes.push_back({false, tokens});
    }
    return shapes;
}

// Prints the parts of a capture by groups of shapes, as median/longest in milliseconds.
inline void print_parts(Model& model, const Options& options, c10::cuda::CUDAStream stream) {
    vmmgraph::SharedVmmAllocator arena(0);
    const auto capturing = c10::cuda::getStreamFromPool(true, 0);
    const auto pool = at::cuda::graph_pool_handle();
    std::map<std::string, std::map<std::string, std::vector<double>>> table;
    // Kept until the end: torch frees the common pool with its last graph.
    std::vector<StockGraph> stock;
    for (const auto& shape : all_shapes(options)) {
        Parts cold;
        const auto start = Clock::now();
        ArenaGraph first(model, shape, capturing, arena, cold);
        const auto cold_ms = ms_since(start);
        // Kept for the second capture's timing: the pages exist already, as in steady state.
        Parts parts;
        ArenaGraph second(model, shape, capturing, arena, parts);
        second.instantiate(parts);
        second.upload(stream, parts);
        timed(parts, "replay", [&] {
            second.replay(stream);
            stream.synchronize();
        });
        for (int i = 0; i < 2; ++i) {
            parts.erase("eager");
            parts.erase("eager_host");
            timed(parts, "eager", [&] {
                timed(parts, "eager_host", [&] { model.forward(shape); });
                stream.synchronize();
            });
        }
        Parts of_stock;
        stock.emplace_back(model, shape, capturing, pool, of_stock);
        stock.back().instantiate(of_stock);
        second.destroy(parts);
        timed(parts, "trim", [&] { arena.trim(); });
        auto& row = table[group_of(shape)];
        row["cold"].push_back(cold_ms);
        row["cold_record"].push_back(cold["record"]);
        for (const auto& [name, ms] : parts) {
            row[name].push_back(ms);
        }
        for (const auto& [name, ms] : of_stock) {
            row["stock_" + name].push_back(ms);
        }
    }
    for (const std::vector<const char*>& columns :
         {std::vector<const char*>{"cold", "cold_record", "begin", "record", "end", "end_driver",
                                   "scope", "instantiate", "upload"},
          std::vector<const char*>{"replay", "destroy", "trim", "eager_host", "eager",
                                   "stock_begin", "stock_record", "stock_end",
                                   "stock_instantiate"}}) {
        std::printf("RESULT parts, ms    ");
        for (const auto* const name : columns) {
            std::printf(" %17s", name);
        }
        std::printf("\n");
        for (auto& [group, row] : table) {
            std::printf("RESULT %-13s ", group.c_str());
            for (const auto* const name : columns) {
                std::printf(" %8.2f/%8.2f", at_share(row[name], 0.5), at_share(row[name], 1));
            }
            std::printf("\n");
        }
    }
}

// One thread launches a graph a step and waits for the graph, while a second thread does `beside`.
template <class Graph>
class Steps {
public:
    // `ready` prepares a second thread before the steps are measured.
    Steps(std::vector<std::pair<Shape, Graph>>& graphs, c10::cuda::CUDAStream stream,
          std::function<void()> ready)
        : graphs_(graphs), stream_(stream), ready_(std::move(ready)) {
        std::map<std::size_t, std::vector<double>> measured;
        for (int i = 0; i < 800; ++i) {
            const auto [number, ms] = step();
            measured[number].push_back(ms);
        }
        for (const auto& [number, values] : measured) {
            medians_[number] = at_share(values, 0.5);
        }
    }
    // Prints the steps during `beside`; without: of 800 steps.
    void during(const std::string& name, const std::function<void()>& beside) {
        std::atomic<bool> begun{!beside};
        std::atomic<bool> over{false};
        std::thread thread;
        if (beside) {
            thread = std::thread([&] {
                const c10::InferenceMode inference;
                try {
                    ready_();
                    begun = true;
                    beside();
                } catch (const std::exception& error) {
                    std::printf("RESULT control, %s: %.300s\n", name.c_str(), error.what());
                }
                begun = over = true;
            });
        }
        while (!begun) {
            std::this_thread::yield();
        }
        std::vector<double> ratios;
        const auto start = Clock::now();
        while (beside ? !over && ratios.size() < 100'000 : ratios.size() < 800) {
            const auto [number, ms] = step();
            ratios.push_back(ms / medians_[number]);
        }
        const auto all = ms_since(start);
        if (thread.joinable()) {
            thread.join();
        }
        std::printf(
            "RESULT control, %s: %zu steps in %.0f ms; step over the median of its graph alone: "
            "median %.3f, p99 %.3f, longest %.3f x\n",
            name.c_str(), ratios.size(), all, at_share(ratios, 0.5), at_share(ratios, 0.99),
            at_share(ratios, 1));
    }

private:
    std::pair<std::size_t, double> step() {
        const auto number = static_cast<std::size_t>(random_() % graphs_.size());
        const auto start = Clock::now();
        graphs_[number].second.replay(stream_);
        stream_.synchronize();
        return {number, ms_since(start)};
    }

    std::vector<std::pair<Shape, Graph>>& graphs_;
    c10::cuda::CUDAStream stream_;
    std::function<void()> ready_;
    std::mt19937_64 random_{3};
    std::map<std::size_t, double> medians_;
};

// Runs the phases of the control over graphs made by `make(shape, parts)`.
template <class Graph, class Make>
void control_of(const std::string& name, const Options& options, c10::cuda::CUDAStream stream,
                const std::function<void()>& ready, Make&& make) {
    Parts ignored;
    std::vector<std::pair<Shape, Graph>> graphs;
    for (const std::int64_t tokens : {1, 8, 64, 128, 256, 512}) {
        graphs.emplace_back(Shape{true, tokens}, make(Shape{true, tokens}, ignored));
        graphs.back().second.instantiate(ignored);
    }
    Steps<Graph> steps(graphs, stream, ready);
    steps.during(name + ", nothing beside", nullptr);
    const auto shapes = all_shapes(options);
    std::vector<Graph> made;
    const auto record = [&] {
        for (const auto& shape : shapes) {
            made.push_back(make(shape, ignored));
        }
    };
    steps.during(name + ", records 65 shapes, cold", record);
    made.clear();
    steps.during(name + ", records 65 shapes again", record);
    steps.during(name + ", instantiates 65 graphs", [&] {
        for (auto& graph : made) {
            graph.instantiate(ignored);
        }
    });
    steps.during(name + ", destroys 65 graphs", [&] { made.clear(); });
    steps.during(name + ", records and instantiates", [&] {
        for (const auto& shape : shapes) {
            made.push_back(make(shape, ignored));
            made.back().instantiate(ignored);
        }
    });
}

// Prints steps of a thread while a second thread captures: `stock` uses torch alone, else an arena.
inline void print_control(Model& model, const Options& options, c10::cuda::CUDAStream stream,
                          bool stock) {
    const auto capturing = c10::cuda::getStreamFromPool(true, 0);
    // Makes a thread's library handles, which a capture cannot make.
    const auto ready = [&] {
        const c10::cuda::CUDAStreamGuard current(capturing);
        model.forward({true, 64});
        model.forward({false, 64});
        capturing.synchronize();
    };
    ready();
    if (stock) {
        const auto pool = at::cuda::graph_pool_handle();
        control_of<StockGraph>("stock", options, stream, ready,
                               [&](const Shape& shape, Parts& parts) {
                                   return StockGraph(model, shape, capturing, pool, parts);
                               });
        return;
    }
    vmmgraph::SharedVmmAllocator arena(0);
    control_of<ArenaGraph>("ours", options, stream, ready, [&](const Shape& shape, Parts& parts) {
        return ArenaGraph(model, shape, capturing, arena, parts);
    });
}

}  // namespace shootout
