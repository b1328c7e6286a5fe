#include <ATen/cuda/CUDAGraph.h>
#include <vmmgraph/torch.hpp>

#include "run.hpp"

namespace differential {
namespace {

class StockGraph final : public Graph {
public:
    explicit StockGraph(std::unique_ptr<at::cuda::CUDAGraph> graph) : graph_(std::move(graph)) {}
    void replay(const Stream& stream) override {
        const c10::cuda::CUDAStreamGuard guard(stream);
        graph_->replay();
    }

private:
    std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

// From torch 2.14 on, graphs find their generators. A template: this release may lack the call.
template <class Graph>
void draw_from(Graph& graph, const at::Generator& generator) {
    if constexpr (requires { graph.register_generator_state(generator); }) {
        graph.register_generator_state(generator);
    }
}

// Like torch.cuda.graph() of Python, which always ends the capture.
class StockCapture final : public Capture {
public:
    StockCapture(const Stream& stream, const std::vector<at::Generator>& generators)
        : stream_(stream), guard_(stream), graph_(std::make_unique<at::cuda::CUDAGraph>()) {
        for (const auto& generator : generators) {
            draw_from(*graph_, generator);
        }
        graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    }
    ~StockCapture() override {
        if (graph_) {
            // The body may have changed the stream.
            const c10::cuda::CUDAStreamGuard back(stream_);
            try {
                graph_->capture_end();
            } catch (...) {
                // The earlier exception describes the failure.
            }
        }
    }
    GraphPtr end() override {
        graph_->capture_end();
        return std::make_unique<StockGraph>(std::move(graph_));
    }

private:
    Stream stream_;
    c10::cuda::CUDAStreamGuard guard_;
    std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

class Stock final : public Way {
public:
    std::unique_ptr<Capture> begin(const Stream& stream,
                                   const std::vector<at::Generator>& generators) override {
        return std::make_unique<StockCapture>(stream, generators);
    }
};

class OurGraph final : public Graph {
public:
    explicit OurGraph(vmmgraph::torch::CapturedGraph graph) : graph_(std::move(graph)) {}
    void replay(const Stream& stream) override { graph_.replay(stream.stream()); }

private:
    vmmgraph::torch::CapturedGraph graph_;
};

class OurCapture final : public Capture {
public:
    OurCapture(vmmgraph::SharedVmmAllocator& arena, const Stream& stream,
               const vmmgraph::torch::CaptureOptions& options)
        : scope_(arena, stream.stream(), options) {}
    GraphPtr end() override { return std::make_unique<OurGraph>(scope_.end()); }

private:
    vmmgraph::torch::CaptureScope scope_;
};

class Ours final : public Way {
public:
    // On the blocks route each replay of another graph evicts and instantiates.
    explicit Ours(vmmgraph::torch::Route route) {
        options_.route = route;
        if (route == vmmgraph::torch::Route::blocks) {
            options_.executables = std::make_shared<vmmgraph::torch::ExecutablePool>(
                arena_, vmmgraph::torch::ExecutableLimits{1, 0});
        }
    }
    void install() override {
        if (options_.route == vmmgraph::torch::Route::blocks) {
            vmmgraph::torch::install();
        }
    }
    void uninstall() override { vmmgraph::torch::uninstall(); }
    std::unique_ptr<Capture> begin(const Stream& stream,
                                   const std::vector<at::Generator>& generators) override {
        auto options = options_;
        for (const auto& generator : generators) {
            options.generators.push_back(std::make_shared<at::Generator>(generator));
        }
        return std::make_unique<OurCapture>(arena_, stream, options);
    }
    std::size_t mapped() override { return arena_.mapped_size(); }
    std::size_t held() override {
        arena_.trim();
        return mapped();
    }

private:
    vmmgraph::SharedVmmAllocator arena_{0};
    vmmgraph::torch::CaptureOptions options_;
};

class Again final : public Way {
public:
    bool captures() const override { return false; }
    std::unique_ptr<Capture> begin(const Stream&, const std::vector<at::Generator>&) override {
        TORCH_CHECK(false, "a capture on a stream needs a GPU");
    }
};

}  // namespace

GraphPtr Way::capture(const Stream& stream, const Body& body,
                      const std::vector<at::Generator>& generators) {
    auto capture = begin(stream, generators);
    body();
    return capture->end();
}

std::unique_ptr<Way> make_stock() { return std::make_unique<Stock>(); }

std::unique_ptr<Way> make_way(const std::string& name) {
    if (name == "stock") {
        return make_stock();
    }
    if (name == "blocks") {
        return std::make_unique<Ours>(vmmgraph::torch::Route::blocks);
    }
    if (name == "mempool") {
        return std::make_unique<Ours>(vmmgraph::torch::Route::mempool);
    }
    return name == "eager" || name == "again" ? std::make_unique<Again>() : nullptr;
}

}  // namespace differential
