// Common interface of the ways to allocate the memory of many graphs.

#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <vmmgraph/torch.hpp>

#include "options.hpp"
#include "published.hpp"

namespace shootout {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes of torch's segments, in private pools and in the default pool.
struct Reserved {
    std::uint64_t in_private = 0;
    std::uint64_t in_default = 0;
};

inline Reserved reserved() {
    Reserved bytes;
    for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot({0, 0}, false).segments) {
        const bool owned =
            segment.owner_private_pool_id.first != 0 || segment.owner_private_pool_id.second != 0;
        (owned ? bytes.in_private : bytes.in_default) += segment.total_size;
    }
    return bytes;
}

class Way {
public:
    using Body = std::function<void()>;

    Way() = default;
    Way(const Way&) = delete;
    Way& operator=(const Way&) = delete;
    virtual ~Way() = default;

    // Captures `body` on torch's current stream.
    virtual void capture(c10::cuda::CUDAStream stream, const Body& body) = 0;
    virtual void replay(std::size_t index, c10::cuda::CUDAStream stream) = 0;
    // Physical bytes behind the graphs' tensors.
    [[nodiscard]] virtual std::uint64_t pool_bytes() const { return reserved().in_private; }
    // Bytes of cuBLAS workspaces; 0 if in torch's default pool, as after a warm-up.
    [[nodiscard]] virtual std::uint64_t workspace_bytes() const { return 0; }
    // Driver calls so far for creating, mapping and reserving memory; empty if not counted.
    [[nodiscard]] virtual std::optional<std::uint64_t> driver_calls() const { return std::nullopt; }
    [[nodiscard]] virtual std::optional<double> open_space_us() { return std::nullopt; }
    [[nodiscard]] virtual bool captures() const { return true; }
};

class Eager final : public Way {
public:
    void capture(c10::cuda::CUDAStream, const Body& body) override {
        bodies_.push_back(body);
        body();
    }
    void replay(std::size_t index, c10::cuda::CUDAStream) override { bodies_[index](); }
    [[nodiscard]] std::uint64_t pool_bytes() const override { return reserved().in_default; }
    [[nodiscard]] bool captures() const override { return false; }

private:
    std::vector<Body> bodies_;
};

class TorchPools final : public Way {
public:
    explicit TorchPools(bool shared) {
        if (shared)
            pool_ = at::cuda::graph_pool_handle();
    }
    void capture(c10::cuda::CUDAStream, const Body& body) override {
        auto graph = std::make_unique<at::cuda::CUDAGraph>();
        graph->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
        body();
        graph->capture_end();
        graphs_.push_back(std::move(graph));
    }
    void replay(std::size_t index, c10::cuda::CUDAStream) override { graphs_[index]->replay(); }

private:
    c10::MempoolId_t pool_{0, 0};
    std::vector<std::unique_ptr<at::cuda::CUDAGraph>> graphs_;
};

class Published final : public Way {
public:
    explicit Published(int device) : arena_(std::make_shared<PublishedArena>(device)) {}

    void capture(c10::cuda::CUDAStream, const Body& body) override {
        const auto start = std::chrono::steady_clock::now();
        PublishedArena::Space* const space = arena_->open();
        open_s_ += seconds_since(start);
        // Torch may free segments after this object is destroyed.
        Shot shot;
        shot.allocator = torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
            [arena = arena_, space](std::size_t bytes, int, cudaStream_t) {
                return arena->allocate(*space, bytes);
            },
            [arena = arena_](void*, std::size_t, int, cudaStream_t) {});
        shot.pool = std::make_unique<at::cuda::MemPool>(shot.allocator);
        shot.graph = std::make_unique<at::cuda::CUDAGraph>();
        shot.graph->capture_begin(shot.pool->id(), cudaStreamCaptureModeThreadLocal);
        body();
        shot.graph->capture_end();
        shots_.push_back(std::move(shot));
    }
    void replay(std::size_t index, c10::cuda::CUDAStream) override {
        shots_[index].graph->replay();
    }
    [[nodiscard]] std::uint64_t pool_bytes() const override { return arena_->physical_bytes(); }
    [[nodiscard]] std::optional<std::uint64_t> driver_calls() const override {
        return arena_->calls();
    }
    [[nodiscard]] std::optional<double> open_space_us() override {
        if (shots_.empty())
            return std::nullopt;
        return open_s_ * 1e6 / static_cast<double>(shots_.size());
    }

private:
    struct Shot {
        std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> allocator;
        std::unique_ptr<at::cuda::MemPool> pool;
        std::unique_ptr<at::cuda::CUDAGraph> graph;
    };
    std::shared_ptr<PublishedArena> arena_;
    std::vector<Shot> shots_;
    double open_s_ = 0;
};

class VmmGraph final : public Way {
public:
    VmmGraph(const Options& options, vmmgraph::torch::Route route)
        : device_(vmmgraph::Device::open(device_options(options))),
          arena_(device_, arena_options(options)) {
        options_.route = route;
        if (route == vmmgraph::torch::Route::blocks)
            vmmgraph::torch::install();
    }
    ~VmmGraph() override {
        graphs_.clear();
        try {
            if (vmmgraph::torch::installed())
                vmmgraph::torch::uninstall();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "uninstall: %s\n", error.what());
        }
    }

    void capture(c10::cuda::CUDAStream stream, const Body& body) override {
        graphs_.push_back(vmmgraph::torch::capture(arena_, stream.stream(), body, options_));
        graphs_.back().instantiate();
    }
    void replay(std::size_t index, c10::cuda::CUDAStream stream) override {
        graphs_[index].replay(stream.stream());
    }
    [[nodiscard]] std::uint64_t pool_bytes() const override {
        return device_.stats().physical_bytes;
    }
    [[nodiscard]] std::optional<std::uint64_t> driver_calls() const override {
        const vmmgraph::DeviceStats stats = device_.stats();
        // Upper bound: access is set once for a run of maps.
        return stats.pages_created + stats.pages_released + 2 * stats.maps + stats.unmaps +
               stats.reservations;
    }
    // Private pool bytes outside the captures' segments.
    [[nodiscard]] std::uint64_t workspace_bytes() const override {
        if (options_.route == vmmgraph::torch::Route::blocks)
            return 0;
        return reserved().in_private - arena_.stats().live_bytes;
    }
    // Of empty spaces after all captures.
    [[nodiscard]] std::optional<double> open_space_us() override {
        constexpr int kSpaces = 16;
        std::vector<vmmgraph::Space> spaces;
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kSpaces; ++i)
            spaces.push_back(arena_.open_space());
        return seconds_since(start) * 1e6 / kSpaces;
    }
    [[nodiscard]] vmmgraph::SealReport sum() const {
        vmmgraph::SealReport total{};
        for (const vmmgraph::torch::CapturedGraph& graph : graphs_) {
            total.peak_live_bytes = std::max(total.peak_live_bytes, graph.report().peak_live_bytes);
            total.maps += graph.report().maps;
            total.retained_bytes += graph.report().retained_bytes;
            total.retained_blocks += graph.report().retained_blocks;
            total.driver_calls += graph.report().driver_calls;
            total.driver_ns += graph.report().driver_ns;
        }
        return total;
    }

private:
    static vmmgraph::DeviceOptions device_options(const Options& options) {
        vmmgraph::DeviceOptions given;
        given.driver = vmmgraph::DriverChoice::cuda;
        given.device = options.device;
        return given;
    }
    static vmmgraph::ArenaOptions arena_options(const Options& options) {
        vmmgraph::ArenaOptions given;
        given.small_page_bytes = options.small_page_mib << 20;
        given.large_page_bytes = options.large_page_mib << 20;
        return given;
    }

    vmmgraph::Device device_;
    vmmgraph::SharedVmmAllocator arena_;
    vmmgraph::torch::CaptureOptions options_;
    std::vector<vmmgraph::torch::CapturedGraph> graphs_;
};

// Makes the way with this name. CUDA must be initialised.
inline std::unique_ptr<Way> make_way(const std::string& name, const Options& options) {
    if (name == "eager")
        return std::make_unique<Eager>();
    if (name == "private")
        return std::make_unique<TorchPools>(false);
    if (name == "shared" || name == "shared_expandable")
        return std::make_unique<TorchPools>(true);
    if (name == "published")
        return std::make_unique<Published>(options.device);
    if (name == "mempool")
        return std::make_unique<VmmGraph>(options, vmmgraph::torch::Route::mempool);
    if (name == "blocks")
        return std::make_unique<VmmGraph>(options, vmmgraph::torch::Route::blocks);
    throw std::invalid_argument("no way is called '" + name + "'");
}

}  // namespace shootout
