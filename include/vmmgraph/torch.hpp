// VmmGraph for libtorch: captures with tensors in a space. Link VmmGraph::torch, which includes
// VmmGraph::vmmgraph.
//
//   vmmgraph::SharedVmmAllocator arena(0);
//   vmmgraph::torch::install();
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] { logits.copy_(model(input)); });
//   graph.replay(stream);
//
// This header includes no torch header. The library is built for one torch release, see
// built_for().

#ifndef VMMGRAPH_TORCH_HPP
#define VMMGRAPH_TORCH_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ring.hpp"
#include "vmmgraph.hpp"

namespace c10::cuda::CUDACachingAllocator {
class CUDAAllocator;
}
namespace at {
struct Generator;
}

namespace vmmgraph::torch {

// torch's c10::cuda::CUDACachingAllocator::CUDAAllocator, only named by this header.
using TorchAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

// Route of torch's allocations to the space.
enum class Route {
    // Each tensor is a block: pages are stitched, and frees are seen. Needs install().
    blocks,
    // Stock torch: a MemPool allocates segments, which live as long as the graph. One cuBLAS
    // workspace, outside the arena's pages, serves all captures. Up to torch 2.9, not with
    // expandable_segments, which bypass a pool's allocator. Later, and with the blocks route, the
    // setting makes no difference.
    mempool,
};

// Limits of a pool of executables; 0: no limit.
struct ExecutableLimits {
    // Captured graphs with executables at a time; a piecewise graph counts once.
    std::size_t max_graphs = 0;
    // Measured device memory of executables in bytes (ExecutableStats::bytes).
    std::uint64_t max_bytes = 0;
};

// Contents and counters of a pool of executables.
struct ExecutableStats {
    ExecutableLimits limits;
    // Captured graphs, and those with executables now; a piecewise graph counts once.
    std::uint64_t graphs = 0;
    std::uint64_t instantiated = 0;
    // Executables now, and their nodes.
    std::uint64_t executables = 0;
    std::uint64_t nodes = 0;
    // Nodes of all captured graphs, each about a KiB of host memory.
    std::uint64_t template_nodes = 0;
    // Bytes of device memory taken by executables: the change of free device memory at each
    // instantiation. The driver reuses the memory of destroyed executables and never returns the
    // memory.
    std::uint64_t bytes = 0;
    // Instantiated graphs, those instantiated ahead of a replay, and graphs evicted for room.
    std::uint64_t instantiations = 0;
    std::uint64_t ahead = 0;
    std::uint64_t evictions = 0;
    // Replays with ready executables, and replays which had to instantiate first.
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
};

// Pool of the executables of a device's graphs. A captured graph is a template in host memory. Its
// executable (cudaGraphExec_t) takes device memory outside every allocator: 100 to 130 KiB, plus 2
// to 3 KiB per node. A graph is instantiated at its first replay or ahead of it. Beyond the limits,
// the executables of the least recently launched graph are destroyed; its next replay instantiates
// again, at about 2 us of host time per node (docs/performance.md). Any thread.
//
// Never evicted: graphs which allocate memory or have child graphs or conditions, graphs with
// collectives possibly registered with NCCL, and graphs after exec().
class VMMGRAPH_API ExecutablePool {
public:
    // Creates a pool on the arena's device, for captures which name the pool. Throws Error as
    // CaptureScope unless the arena is on a CUDA device.
    explicit ExecutablePool(const SharedVmmAllocator& arena, const ExecutableLimits& limits = {});
    ExecutablePool(const ExecutablePool&) = delete;
    ExecutablePool& operator=(const ExecutablePool&) = delete;
    ~ExecutablePool();

    // Returns the device's default pool, for captures which name none; without limits at first.
    // Lives as long as its graphs and owners.
    [[nodiscard]] static std::shared_ptr<ExecutablePool> of(const SharedVmmAllocator& arena);

    // Executables beyond the limits are destroyed at once, except while being launched.
    void set_limits(const ExecutableLimits& limits);
    // As vmmgraph_torch_evict_executables.
    void evict();
    [[nodiscard]] ExecutableStats stats() const;
    // Returns the counters in Prometheus's text format, with these labels on every sample. `state`
    // and `what` are reserved labels.
    [[nodiscard]] std::string prometheus(
        const std::vector<std::pair<std::string, std::string>>& labels = {}) const;

private:
    friend class CapturedGraph;
    friend class CaptureScope;
    friend class Template;
    struct State;
    std::unique_ptr<State> state_;
};

// Options of a capture.
struct CaptureOptions {
    Route route = Route::blocks;
    // Policy for tensors still live at the end of the capture.
    Retain retain = Retain::inherit;
    // Replaces memset nodes, which CUDA launches one by one, by torch's fill kernels: saves the
    // host a microsecond per node and launch (docs/performance.md). Results are the same.
    bool memset_kernels = true;
    // Pool of its executables; null: ExecutablePool::of(arena).
    std::shared_ptr<ExecutablePool> executables = nullptr;
    // Random generators of the body, besides torch's default generator of the device. Every replay
    // draws new numbers and advances the generators. Each must be on the arena's device and in no
    // other running capture. From torch 2.14 on, torch finds generators itself; before, drawing
    // from an unnamed generator is torch's error.
    std::vector<std::shared_ptr<const at::Generator>> generators{};
    // Label of the captured graph group: Space::set_label, from the beginning of the capture.
    std::string label{};
    // Ring of units which the body acquires and releases (UnitScope with the capture's stream),
    // each streamed unit once, in order of use. The graph copies units beside its kernels, from
    // their sources at each replay. Must be on the arena's device; may be destroyed before the
    // graph. Makes the executable the graph's own. Not with next_piece().
    Ring* ring = nullptr;
    RingCaptureOptions ring_capture{};
};

// Installs a forwarding allocator over torch's. Everything is forwarded except allocations of
// captures by the blocks route, eager scopes and region scopes. Throws Error
// (VMMGRAPH_ERROR_WRONG_STATE) if torch's allocator is not the native one, if its caching is off,
// or if the loaded torch is not the release of built_for(). A second call does nothing.
VMMGRAPH_API void install();
// Removes the forwarding allocator. Throws Error if another allocator was installed over this one,
// or during a capture. Live blocks stay valid and can be freed.
VMMGRAPH_API void uninstall();
// Returns true if the forwarding allocator is torch's current one.
[[nodiscard]] VMMGRAPH_API bool installed() noexcept;
// The torch release of this build, as "2.11.0".
[[nodiscard]] VMMGRAPH_API const char* built_for() noexcept;

// A captured graph and the space with its tensors. Destruction waits for the arena's replays so
// far, since memory read by a graph is often freed with the graph. A moved-from object throws Error
// (VMMGRAPH_ERROR_INVALID_HANDLE) or returns 0.
//
// A live tensor of the capture keeps only the pages under the tensor; its bytes are the last
// replay's. Freed, the memory is reused after these replays, the default stream, torch's current
// stream at the free, and the streams of record_stream(). Record every other stream which reads the
// tensor outside replays, if the tensor may be freed before the read is over.
class VMMGRAPH_API CapturedGraph {
public:
    CapturedGraph(CapturedGraph&&) noexcept;
    CapturedGraph& operator=(CapturedGraph&&) noexcept;
    ~CapturedGraph();

    // Launches the graph (or its pieces) on `stream` (a cudaStream_t), ordered after every earlier
    // replay of the arena. Any thread. Throws Error (VMMGRAPH_ERROR_STREAM_CAPTURING) for a stream
    // under capture. Records no event if `stream` is torch's current stream and torch's own. Any
    // other stream costs an event record and a wait, and may be destroyed afterwards.
    void replay(void* stream);
    // Launches the pieces in order as one replay: no other graph of the arena runs in between.
    // `between(n)` is called after the n-th piece, from 0, except the last, with `stream` as
    // torch's current stream. `between` must not replay, capture, mark or trim in this arena.
    void replay(void* stream, const std::function<void(std::size_t)>& between);
    // Number of graphs in the capture: 1, plus 1 per CaptureScope::next_piece().
    [[nodiscard]] std::size_t pieces() const noexcept;
    // As Space::verify, without the work between pieces. If the outputs differ, the graph relies on
    // leftovers of other graphs.
    [[nodiscard]] Difference verify(void* stream, const std::vector<Output>& outputs);
    // Number of memset nodes replaced by kernels.
    [[nodiscard]] std::size_t memset_kernels() const noexcept;
    // Memory and driver calls of the capture.
    [[nodiscard]] const SealReport& report() const;
    // The space; tensors free its blocks.
    [[nodiscard]] const Space& space() const;
    // Returns the cudaGraphExec_t of the last piece, which stays this graph's own from then on.
    // Throws Error if instantiation fails.
    [[nodiscard]] void* exec() const;
    // Returns the cudaGraphExec_t of any piece, from 0. Also throws Error
    // (VMMGRAPH_ERROR_INVALID_ARGUMENT) for an unknown piece.
    [[nodiscard]] void* exec(std::size_t piece) const;

    // Instantiates the graph ahead of its first replay, unless the limits require evicting a graph
    // launched last or instantiated since. Returns true if the graph has executables now. Any
    // thread, but not during destruction. Throws Error (out of memory).
    bool instantiate();
    // As instantiate(), soon, on a thread of the pool; errors are only logged.
    void instantiate_soon();
    // Returns true if the graph has executables now.
    [[nodiscard]] bool is_instantiated() const;
    // Device memory of its executables in bytes, estimated from the pool's measurements so far.
    [[nodiscard]] std::uint64_t executable_bytes() const;
    // The pool; null up to torch 2.7.
    [[nodiscard]] std::shared_ptr<ExecutablePool> executables() const;

private:
    friend class CaptureScope;
    struct State;
    explicit CapturedGraph(std::unique_ptr<State> state) noexcept;
    [[nodiscard]] State& state() const;
    std::unique_ptr<State> state_;
};

// One capture on the calling thread. Begins with the arena's device as the current one and `stream`
// (a cudaStream_t of this device, not the default stream) as torch's current stream. The end of the
// capture restores both. Destruction without end() abandons the capture; torch and the arena stay
// usable.
class VMMGRAPH_API CaptureScope {
public:
    // Throws Error. VMMGRAPH_ERROR_INVALID_ARGUMENT: a ring up to torch 2.7, which keeps no
    // captured graph; the default stream; a stream, generator or pool of executables of another
    // device; an arena of the host driver; own pages by the MemPool route.
    // VMMGRAPH_ERROR_STREAM_CAPTURING: a stream under capture. VMMGRAPH_ERROR_WRONG_STATE: before
    // install() (blocks route), and for states which install() refuses. Torch's errors propagate.
    CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options = {});
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;
    ~CaptureScope();

    // Ends a graph and begins the next in the same space, for work in between which no graph can
    // hold. Live tensors stay valid, and the next piece reuses memory freed by this one. On failure
    // destroy the scope; the capture is lost.
    void next_piece();

    // Returns true if the storage at this address is memory of this capture, persistent (kept) or
    // not: the address belongs to the graph for the graph's lifetime, even after a free. All other
    // memory (general, host, other captures) belongs to its owners.
    [[nodiscard]] bool holds(const void* storage) const;

    // Returns the last kernel of torch's current stream in this capture (a cudaGraphNode_t of this
    // piece), to change its parameters between replays by cudaGraphExecKernelNodeSetParams on
    // CapturedGraph::exec(piece), never during a replay. Makes the executables the graph's own.
    // Throws Error (VMMGRAPH_ERROR_WRONG_STATE) if the stream's last node is missing or no kernel,
    // or if the stream has joined several streams since.
    [[nodiscard]] void* last_kernel();

    // Ends the capture and seals the space. On failure destroy the scope; the capture is lost.
    [[nodiscard]] CapturedGraph end();

private:
    struct State;
    std::unique_ptr<State> state_;
};

// Captures the work given by `body` to torch's current stream. An exception of `body` abandons the
// capture and reaches the caller: also torch's c10::OutOfMemoryError, if a tensor has no memory.
template <class Body>
[[nodiscard]] CapturedGraph capture(SharedVmmAllocator& arena, void* stream, Body&& body,
                                    const CaptureOptions& options = {}) {
    CaptureScope scope(arena, stream, options);
    std::forward<Body>(body)();
    return scope.end();
}

// Kept scope: tensors allocated by its thread in a capture by the blocks route are persistent
// (kept) blocks (Space::allocate_kept), packed on common pages, so a small output does not cost a
// page. May be nested; destroy on the same thread. No effect outside captures, by the MemPool
// route, and on other threads.
//
//   at::Tensor logits;
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] {
//       const auto hidden = model(input);                      // temporary
//       const vmmgraph::torch::KeptScope kept;
//       logits = hidden.clone();                               // stays
//   });
//
// Only for lasting tensors: the bytes are reused only after both the tensor and its graph are gone.
// So put only the operation which makes the output into the scope. Independent of Retain.
class VMMGRAPH_API KeptScope {
public:
    KeptScope() noexcept;
    KeptScope(const KeptScope&) = delete;
    KeptScope& operator=(const KeptScope&) = delete;
    ~KeptScope();

    // Returns true if this thread is in a KeptScope.
    [[nodiscard]] static bool active() noexcept;
};

// Remote scope: tensors allocated by its thread in a capture by the blocks route are peer-visible
// (remote) blocks (Space::allocate_remote). For buffers which peers access through their pages:
// collectives registered by NCCL in the capture, or pages exported afterwards (share.hpp). Each
// lies on one page or on whole ones. If freed before the end of the capture, none of its pages is
// replaced. May be nested; the innermost of this and KeptScope counts; destroy on the same thread.
// No effect outside captures, by the MemPool route, and on other threads.
//
//   CaptureOptions options;
//   options.retain = vmmgraph::Retain::shared_remote;
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] {
//       at::Tensor partial;
//       {
//           const vmmgraph::torch::RemoteScope remote;
//           partial = at::mm(x, weight);                       // NCCL may register the buffer
//       }
//       all_reduce(partial);
//       output = partial + residual;                           // stays, on pages of its own
//   }, options);
//
// Captures with NCCL collectives are sealed in place, since their buffers are unknown, or refused
// if impossible. Retain::shared_remote declares all buffers marked: the seal leaves RemoteScope
// tensors alone and gives all other live tensors pages of their own. A capture without any mark is
// sealed in place anyway. A buffer alive at the end stays on shared pages: copy its contents.
class VMMGRAPH_API RemoteScope {
public:
    RemoteScope() noexcept;
    RemoteScope(const RemoteScope&) = delete;
    RemoteScope& operator=(const RemoteScope&) = delete;
    ~RemoteScope();

    // Returns true if this thread is in a RemoteScope, without a KeptScope inside.
    [[nodiscard]] static bool active() noexcept;

private:
    std::size_t around_;
};

// Makes an allocator for a torch MemPool with segments in one space, for engines with their own
// MemPool and CUDAGraph. For each capture, open a bump space and make an allocator and a MemPool;
// seal the space after the capture, and launch through Space::replay. Keep the space as long as its
// graph. The allocator may outlive the space: existing segments can be freed, new ones are an
// Error.
//
// Any thread. Out of memory returns null to torch, which raises its own error. Throws Error for a
// moved-from space, and if the loaded torch is not the release of built_for().
//
// Requirements of torch: up to 2.10, a MemPool does not own its allocator, so keep the allocator
// until the pool, its graphs and their tensors are gone. Up to 2.7, a MemPoolContext must exist on
// the capturing thread for the whole capture. Destroy no pool during a capture. Call
// at::cuda::clearCublasWorkspaces() before and after each capture, or cuBLAS carries a workspace
// from one graph's shared pages into the next graph.
[[nodiscard]] VMMGRAPH_API std::shared_ptr<TorchAllocator> make_allocator(const Space& space);

// As above, with one allocator for all captures of an engine with strictly serial captures:
// segments lie in the arena's current space. Keeps the arena alive. Also throws Error for null.
//
//   auto arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
//   auto allocator = vmmgraph::torch::make_allocator(arena);
//   for each shape:
//     arena->switch_to_new_virtual_space();
//     at::cuda::MemPool pool(allocator);               // a new one: torch reuses a pool's segments
//     graph.capture_begin(pool.id(), …); …; graph.capture_end();
//
// The engine must order its replays: no two graphs of the arena may run at once.
[[nodiscard]] VMMGRAPH_API std::shared_ptr<TorchAllocator> make_allocator(
    std::shared_ptr<SharedVmmAllocator> arena);

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_HPP
