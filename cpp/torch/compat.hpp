// What differs between the torch releases this compiles against, told by what their headers have and never by their numbers.
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

// Complete up to torch 2.7, where an allocator is used only on a thread with such a context; never defined afterwards.
namespace c10::cuda {
struct MemPoolContext;
}

// Torch 2.7 and later; only named here.
namespace at {
struct HostAllocator;
TORCH_API HostAllocator* getHostAllocator(c10::DeviceType device_type);
}  // namespace at

namespace at::cuda {
// ATen/cuda/CUDAContextLight.h, which would pull in cuBLAS, cuSPARSE and cuSOLVER headers.
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace vmmgraph::torch::compat {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using MemPool = VMMGRAPH_TORCH_MEMPOOL;
using PoolId = decltype(at::cuda::graph_pool_handle());

// Whether a MemPool keeps its allocator alive (2.11 and later). Before, it has a plain pointer, and so have the segments it leaves
// behind when a tensor outlives it.
inline constexpr bool pool_owns_allocator = std::is_constructible_v<MemPool, std::shared_ptr<CUDAAllocator>>;

// Whether expandable segments pass a MemPool's allocator by (2.6) or are refused in its pools (2.7 to 2.9). The releases whose
// MemPool is ATen's allocate from the pool's allocator whatever the setting.
inline constexpr bool pool_fails_with_expandable_segments = !VMMGRAPH_TORCH_ATEN_MEMPOOL;

// Whether torch tells its allocator of captures beside their pools (2.13 and later).
template <class Allocator>
inline constexpr bool marks_captures = requires(Allocator& allocator) { allocator.markCaptureEnd(c10::DeviceIndex{0}); };

// Torch's tables of cuBLAS workspaces, by handle and stream: with their sizes since it tells of captures, with a mutex behind each map since
// ATen has the MemPool (2.10 and later). tests/torch/matrix.sh holds both against the header of each release.
using WorkspaceEntry = std::conditional_t<marks_captures<CUDAAllocator>, std::pair<c10::DataPtr, std::size_t>, c10::DataPtr>;
using WorkspaceMap = std::map<std::tuple<void*, void*>, WorkspaceEntry>;
inline constexpr bool workspaces_have_mutex = VMMGRAPH_TORCH_ATEN_MEMPOOL;

inline c10::DataPtr& workspace_of(c10::DataPtr& entry) { return entry; }
inline c10::DataPtr& workspace_of(std::pair<c10::DataPtr, std::size_t>& entry) { return entry.first; }
inline void set_workspace_size(c10::DataPtr&, std::size_t) {}
inline void set_workspace_size(std::pair<c10::DataPtr, std::size_t>& entry, std::size_t bytes) { entry.second = bytes; }
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

// Whether torch takes the end of a pool of the device now. In the destructor, where it empties the pool, it asserts that nobody allocates
// to a pool there, and a program may do so itself: so it is asked for the same of an empty pool first, where it may throw.
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
// Makes a pool's allocator the one of this thread, where torch needs that; stays on this thread for the whole capture.
using PoolContext = ContextOrNone<c10::cuda::MemPoolContext>::type;

// Whether torch keeps the graph that it captured when it is asked to (2.8 and later). Before, capture_end() instantiates it and destroys it.
// VMMGRAPH_TORCH_KEEPS_NO_GRAPHS is for tests: a later release is taken for one of those.
#ifdef VMMGRAPH_TORCH_KEEPS_NO_GRAPHS
template <class Base>
inline constexpr bool keeps_graphs = false;
#else
template <class Base>
inline constexpr bool keeps_graphs = std::is_constructible_v<Base, bool>;
#endif

// A node that does nothing, since torch warns of an empty graph.
inline cudaError_t capture_nothing(cudaStream_t stream) {
    return cudaLaunchHostFunc(stream, [](void*) {}, nullptr);
}

// A graph that stays as it was captured, to be looked at and altered, and is launched by whatever executable it is lent. Torch has both as
// members that it shows to a subclass.
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

    // capture_end() of what is captured on `stream`, torch's current one, without an executable. Where it throws, the capture may go on.
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

    // Before capture_begin(): the capture may draw from this generator of CUDA's, too. From 2.14 on torch asks for none.
    void draw_from(const at::Generator& generator) {
        if constexpr (requires(Base& graph) { graph.register_generator_state(generator); }) {
            this->register_generator_state(generator);
        }
    }

    // Launches on a stream of its device, which is torch's current one. Torch's replay() asks for the device twice, for the state of its
    // context and for that of the stream before it does so, for the sake of generators: a graph that draws no random numbers needs none
    // of that.
    void launch(cudaStream_t stream) {
        const auto& draws = this->captured_generator_states_;
        if (std::any_of(draws.begin(), draws.end(), [](const auto& state) { return state.second != 0; })) {
            this->replay();
        } else {
            C10_CUDA_CHECK(cudaGraphLaunch(this->graph_exec_, stream));
        }
    }

    // After end().
    cudaGraph_t graph() const noexcept { return this->graph_; }

    // Makes launch() and replay() launch an executable that stays the caller's.
    void lend(cudaGraphExec_t exec) noexcept {
        this->graph_exec_ = exec;
        this->has_graph_exec_ = exec != nullptr;
    }

private:
    // It would leave an executable that nobody destroys.
    using Base::capture_end;

    // Has torch end a capture of one node that does nothing, with all that it does at the end of one, and destroys what it made of it.
    void end_another(cudaStream_t stream) {
        C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        C10_CUDA_CHECK(capture_nothing(stream));
        this->capture_end();
        // Torch keeps it in its debug mode.
        if (std::exchange(this->has_graph_, false)) {
            C10_CUDA_CHECK_WARN(cudaGraphDestroy(this->graph_));
        }
        C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(this->graph_exec_));
        lend(nullptr);
    }
};
using Graph = LentGraph<at::cuda::CUDAGraph>;

// A graph of torch's that somebody else made: what LentGraph does with one of ours.
template <class Base>
struct GraphOfOthers : Base {
    // Whether one that was made with keep_graph=True can be lent executables.
    static constexpr bool lends = keeps_graphs<Base>;

    // Whether the graph is what its owner says: its pool, and the cudaGraph_t that it keeps, null where it keeps none.
    static bool is(Base& graph, const decltype(at::cuda::graph_pool_handle())& pool, cudaGraph_t raw) {
        return graph.*(&GraphOfOthers::mempool_id_) == pool && (raw == nullptr || graph.*(&GraphOfOthers::graph_) == raw);
    }

    // As torch's replay(), and with less work where no random numbers are drawn; `exec` is launched where it is not null, and stays the
    // caller's. The graph's device is the current one, and the stream torch's current one.
    static void launch(Base& graph, cudaGraphExec_t exec, cudaStream_t stream) {
        if constexpr (lends) {
            if (exec != nullptr) {
                const auto& draws = graph.*(&GraphOfOthers::captured_generator_states_);
                if (std::none_of(draws.begin(), draws.end(), [](const auto& state) { return state.second != 0; })) {
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

    // Whether a graph ends and releases, when it goes or is reset, the pools that its capture began with and did not come to release (2.14 and later).
    static constexpr bool cleans_up() {
        return requires(GraphOfOthers& graph) { graph.allocated_pool_; };
    }

private:
    // Torch destroys and launches what it has: so it has ours during a launch only.
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

// How often torch's allocator has a pool in use; 0 where a release does not tell.
template <class Allocator, class Id>
int uses_of_pool(Allocator& allocator, c10::DeviceIndex device, const Id& pool) {
    if constexpr (requires { allocator.getPoolUseCount(device, pool); }) {
        return allocator.getPoolUseCount(device, pool);
    } else {
        return 0;
    }
}

// Ends and releases the pool of pinned memory that a capture begins with the id of its own (2.11 and later), for a capture that torch
// does not clean up.
template <class Host = at::HostAllocator>
void abandon_host_pool(const PoolId& pool) noexcept {
    if constexpr (requires(Host& host) { host.end_allocate_to_pool(pool), host.release_pool(pool); }) {
        Host* const host = at::getHostAllocator(c10::DeviceType::CUDA);
        try {
            host->end_allocate_to_pool(pool);
        } catch (...) {
            // It had ended, or never begun.
        }
        try {
            host->release_pool(pool);
        } catch (...) {
            // It had gone, or never been.
        }
    }
}

}  // namespace vmmgraph::torch::compat
