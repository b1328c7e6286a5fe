// Differences between the supported torch releases, detected from their headers and never from
// version numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#if __has_include(<ATen/cuda/MemPool.h>)
#include <ATen/cuda/MemPool.h>
#define VMMGRAPH_TORCH_ATEN_MEMPOOL true
#define VMMGRAPH_TORCH_MEMPOOL at::cuda::MemPool
#else
#define VMMGRAPH_TORCH_ATEN_MEMPOOL false
#define VMMGRAPH_TORCH_MEMPOOL c10::cuda::MemPool
#endif

// Complete up to torch 2.7, which requires one on each allocating thread; never defined later.
namespace c10::cuda {
struct MemPoolContext;
}

namespace at {
struct HostAllocator;
TORCH_API HostAllocator* getHostAllocator(c10::DeviceType device_type);
}  // namespace at

namespace at::cuda {
// Declared in ATen/cuda/CUDAContextLight.h, which pulls in the headers of cuBLAS, cuSPARSE and
// cuSOLVER.
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace vmmgraph::torch::compat {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using MemPool = VMMGRAPH_TORCH_MEMPOOL;
using PoolId = decltype(at::cuda::graph_pool_handle());

// True if a MemPool owns its allocator (2.11 and later). Before, the pool and segments of surviving
// tensors hold a plain pointer.
inline constexpr bool pool_owns_allocator =
    std::is_constructible_v<MemPool, std::shared_ptr<CUDAAllocator>>;

// True if expandable segments bypass a MemPool's allocator (2.6) or are refused in its pools (2.7
// to 2.9).
inline constexpr bool pool_fails_with_expandable_segments = !VMMGRAPH_TORCH_ATEN_MEMPOOL;

// True if torch tells its allocator about captures separately from pools (2.13 and later).
template <class Allocator>
inline constexpr bool marks_captures =
    requires(Allocator& allocator) { allocator.markCaptureEnd(c10::DeviceIndex{0}); };

// Torch's tables of cuBLAS workspaces, by handle and stream: with sizes since 2.13, with a mutex
// since 2.10. tests/torch/matrix.sh checks both against each release.
using WorkspaceEntry = std::conditional_t<marks_captures<CUDAAllocator>,
                                          std::pair<c10::DataPtr, std::size_t>, c10::DataPtr>;
using WorkspaceMap = std::map<std::tuple<void*, void*>, WorkspaceEntry>;
inline constexpr bool workspaces_have_mutex = VMMGRAPH_TORCH_ATEN_MEMPOOL;

inline c10::DataPtr& workspace_of(c10::DataPtr& entry) { return entry; }
inline c10::DataPtr& workspace_of(std::pair<c10::DataPtr, std::size_t>& entry) {
    return entry.first;
}
inline void set_workspace_size(c10::DataPtr&, std::size_t) {}
inline void set_workspace_size(std::pair<c10::DataPtr, std::size_t>& entry, std::size_t bytes) {
    entry.second = bytes;
}
#undef VMMGRAPH_TORCH_MEMPOOL
#undef VMMGRAPH_TORCH_ATEN_MEMPOOL

// The caller keeps `allocator` alive as long as the pool, its graphs and their tensors.
template <class Pool = MemPool>
std::unique_ptr<Pool> make_pool(const std::shared_ptr<CUDAAllocator>& allocator) {
    if constexpr (pool_owns_allocator) {
        return std::make_unique<Pool>(allocator);
    } else {
        return std::make_unique<Pool>(allocator.get());
    }
}

// Returns true if torch can destroy a pool of the device now. The pool's destructor asserts that no
// thread allocates to a pool; the same operation on an empty pool throws instead.
template <class Id = PoolId>
bool may_destroy_pools(c10::DeviceIndex device) {
    namespace caching = c10::cuda::CUDACachingAllocator;
    try {
        const Id id = at::cuda::graph_pool_handle();
        caching::beginAllocateToPool(device, id, [](cudaStream_t) { return false; });
        caching::endAllocateToPool(device, id);
        caching::releasePool(device, id);
        if constexpr (requires { caching::emptyCache(id); }) {
            caching::emptyCache(id);
        } else {
            caching::emptyCache();
        }
        return true;
    } catch (const c10::Error&) {
        return false;
    }
}

struct NoContext {
    explicit NoContext(MemPool*) {}
};
template <class Context>
concept Complete = requires { sizeof(Context); };
template <class Context>
struct ContextOrNone {
    using type = NoContext;
};
template <Complete Context>
struct ContextOrNone<Context> {
    using type = Context;
};
// Makes a pool's allocator current on this thread, if needed. Must live for the whole capture.
using PoolContext = ContextOrNone<c10::cuda::MemPoolContext>::type;

// True if torch can keep the captured graph (2.8 and later); otherwise capture_end() instantiates
// and destroys it. Tests define VMMGRAPH_TORCH_KEEPS_NO_GRAPHS to treat a later release as an
// earlier one.
#ifdef VMMGRAPH_TORCH_KEEPS_NO_GRAPHS
template <class Base>
inline constexpr bool keeps_graphs = false;
#else
template <class Base>
inline constexpr bool keeps_graphs = std::is_constructible_v<Base, bool>;
#endif

// Adds an empty host node, since torch warns about an empty graph.
inline cudaError_t capture_nothing(cudaStream_t stream) {
    return cudaLaunchHostFunc(stream, [](void*) {}, nullptr);
}

// Editable captured graph, launched with an executable lent by the caller.
template <class Base>
struct LentGraph final : Base {
    LentGraph()
        requires(!keeps_graphs<Base>)
    = default;
    LentGraph()
        requires(keeps_graphs<Base>)
        : Base(true) {}
    LentGraph(const LentGraph&) = delete;
    LentGraph& operator=(const LentGraph&) = delete;
    ~LentGraph() { lend(nullptr); }

    // Ends the capture on `stream`, torch's current one, without an executable. If it throws, the
    // capture may still be running.
    void end(cudaStream_t stream) {
        if constexpr (keeps_graphs<Base>) {
            this->capture_end();
        } else {
            cudaGraph_t captured = nullptr;
            C10_CUDA_CHECK(cudaStreamEndCapture(stream, &captured));
            try {
                end_another(stream);
            } catch (...) {
                C10_CUDA_CHECK_WARN(cudaGraphDestroy(captured));
                throw;
            }
            this->graph_ = captured;
            this->has_graph_ = true;
        }
    }

    // Registers a CUDA generator for the capture, before capture_begin(); a no-op from torch 2.14
    // on.
    void draw_from(const at::Generator& generator) {
        if constexpr (requires(Base& graph) { graph.register_generator_state(generator); }) {
            this->register_generator_state(generator);
        }
    }

    // Launches on `stream`, torch's current stream. Calls torch's replay() only if the graph draws
    // random numbers, because replay() queries device, context and stream.
    void launch(cudaStream_t stream) {
        const auto& draws = this->captured_generator_states_;
        if (std::any_of(draws.begin(), draws.end(),
                        [](const auto& state) { return state.second != 0; })) {
            this->replay();
        } else {
            C10_CUDA_CHECK(cudaGraphLaunch(this->graph_exec_, stream));
        }
    }

    cudaGraph_t graph() const noexcept { return this->graph_; }

    // Sets the executable that launch() and replay() use. The caller keeps ownership.
    void lend(cudaGraphExec_t exec) noexcept {
        this->graph_exec_ = exec;
        this->has_graph_exec_ = exec != nullptr;
    }

private:
    // Hidden, since it would leave an executable without an owner.
    using Base::capture_end;

    // Lets torch end a capture of one empty node, with all its bookkeeping, and destroys the
    // result.
    void end_another(cudaStream_t stream) {
        C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        C10_CUDA_CHECK(capture_nothing(stream));
        this->capture_end();
        // Torch keeps the graph in its debug mode.
        if (std::exchange(this->has_graph_, false)) {
            C10_CUDA_CHECK_WARN(cudaGraphDestroy(this->graph_));
        }
        C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(this->graph_exec_));
        lend(nullptr);
    }
};
using Graph = LentGraph<at::cuda::CUDAGraph>;

// Counterpart of LentGraph for a graph made by the program.
template <class Base>
struct GraphOfOthers : Base {
    // True if a graph made with keep_graph=True can be lent executables.
    static constexpr bool lends = keeps_graphs<Base>;

    // Returns true if the graph has the expected pool and cudaGraph_t (`raw` null: not compared).
    static bool is(Base& graph, const decltype(at::cuda::graph_pool_handle())& pool,
                   cudaGraph_t raw) {
        return graph.*(&GraphOfOthers::mempool_id_) == pool &&
               (raw == nullptr || graph.*(&GraphOfOthers::graph_) == raw);
    }

    // Like torch's replay(), faster if no random numbers are drawn. Launches `exec` unless null;
    // the caller keeps ownership. Device and `stream` must be current.
    static void launch(Base& graph, cudaGraphExec_t exec, cudaStream_t stream) {
        if constexpr (lends) {
            if (exec != nullptr) {
                const auto& draws = graph.*(&GraphOfOthers::captured_generator_states_);
                if (std::none_of(draws.begin(), draws.end(),
                                 [](const auto& state) { return state.second != 0; })) {
                    C10_CUDA_CHECK(cudaGraphLaunch(exec, stream));
                    return;
                }
                const Lent lent(graph, exec);
                graph.replay();
                return;
            }
        }
        graph.replay();
    }

    // True if a graph that is destroyed or reset releases the pools of an unfinished capture (2.14
    // and later).
    static constexpr bool cleans_up() {
        return requires(GraphOfOthers& graph) { graph.allocated_pool_; };
    }

private:
    struct Lent {
        Lent(Base& graph, cudaGraphExec_t exec) : graph(graph) {
            graph.*(&GraphOfOthers::graph_exec_) = exec;
            graph.*(&GraphOfOthers::has_graph_exec_) = true;
        }
        Lent(const Lent&) = delete;
        Lent& operator=(const Lent&) = delete;
        ~Lent() {
            graph.*(&GraphOfOthers::graph_exec_) = nullptr;
            graph.*(&GraphOfOthers::has_graph_exec_) = false;
        }
        Base& graph;
    };
};

template <class Allocator, class Id>
int uses_of_pool(Allocator& allocator, c10::DeviceIndex device, const Id& pool) {
    if constexpr (requires { allocator.getPoolUseCount(device, pool); }) {
        return allocator.getPoolUseCount(device, pool);
    } else {
        return 0;
    }
}

// Ends and releases the pinned-memory pool of a capture torch does not clean up (2.11 and later).
template <class Host = at::HostAllocator>
void abandon_host_pool(const PoolId& pool) noexcept {
    if constexpr (requires(Host& host) {
                      host.end_allocate_to_pool(pool), host.release_pool(pool);
                  }) {
        Host* const host = at::getHostAllocator(c10::DeviceType::CUDA);
        try {
            host->end_allocate_to_pool(pool);
        } catch (...) {
            // The pool had ended, or never begun.
        }
        try {
            host->release_pool(pool);
        } catch (...) {
            // The pool was released, or never existed.
        }
    }
}

}  // namespace vmmgraph::torch::compat
