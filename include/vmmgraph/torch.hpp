// VmmGraph for libtorch: captures whose tensors live in a space. Link VmmGraph::torch, which is VmmGraph::vmmgraph and this.
//
//   vmmgraph::SharedVmmAllocator arena(0);
//   vmmgraph::torch::install();
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] { logits.copy_(model(input)); });
//   graph.replay(stream);
//
// This header includes no torch header. The library behind it is built for one torch release; built_for() names it.

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

// torch's c10::cuda::CUDACachingAllocator::CUDAAllocator, which this header only names.
using TorchAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

// How torch's allocations reach the space.
enum class Route {
    // Each tensor is a block: pages are stitched, and frees are seen. Needs install().
    blocks,
    // Stock torch: a MemPool asks for segments, which stay until the graph goes; cuBLAS's workspace is one for all captures of the
    // arena, beside its pages. Up to torch 2.9 not with expandable_segments, which keep a pool from its allocator; afterwards, and by
    // the blocks route, that setting makes no difference.
    mempool,
};

// Limits of a pool of executables; 0: no limit.
struct ExecutableLimits {
    // Captured graphs that may have executables at a time; a piecewise graph counts once.
    std::size_t max_graphs = 0;
    // Bytes of device memory that executables may take, as measured (ExecutableStats::bytes).
    std::uint64_t max_bytes = 0;
};

// Contents of a pool of executables, and events since it was made.
struct ExecutableStats {
    ExecutableLimits limits;
    // Captured graphs of the pool, and those that have executables now; a piecewise graph counts once.
    std::uint64_t graphs = 0;
    std::uint64_t instantiated = 0;
    // Executables now, and their nodes.
    std::uint64_t executables = 0;
    std::uint64_t nodes = 0;
    // Nodes of all captured graphs, each about a KiB of host memory.
    std::uint64_t template_nodes = 0;
    // Bytes of device memory that executables took: the free memory of the device before and after each instantiation. The driver keeps the
    // memory of destroyed executables for later ones, and gives none back.
    std::uint64_t bytes = 0;
    // Graphs that were instantiated, those of them ahead of a replay, and graphs whose executables were destroyed to make room.
    std::uint64_t instantiations = 0;
    std::uint64_t ahead = 0;
    std::uint64_t evictions = 0;
    // Replays that found their executables ready, and replays that had to instantiate first.
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
};

// The executables of a device's graphs. A captured graph is a template in host memory; its executable (cudaGraphExec_t) takes device memory
// outside every allocator: 100 to 130 KiB, and 2 to 3 KiB a node. Each graph is instantiated at its first replay, or ahead of it. Beyond the
// limits the executables of the least recently launched graph are destroyed; its next replay instantiates again, which takes the host about
// 2 us a node (docs/performance.md). Any thread.
//
// Executables stay where a graph allocates memory or has child graphs or conditions, where collectives may be registered with NCCL, and where
// exec() was called.
class VMMGRAPH_API ExecutablePool {
public:
    // Of the arena's device; for graphs whose captures name it. Throws Error as CaptureScope for an arena of no CUDA device.
    explicit ExecutablePool(const SharedVmmAllocator& arena, const ExecutableLimits& limits = {});
    ExecutablePool(const ExecutablePool&) = delete;
    ExecutablePool& operator=(const ExecutablePool&) = delete;
    ~ExecutablePool();

    // The pool of captures that name none: one for a device, without limits until it is given some. It goes with the last of its graphs and
    // owners.
    [[nodiscard]] static std::shared_ptr<ExecutablePool> of(const SharedVmmAllocator& arena);

    // Executables beyond them are destroyed at once, except those that are being launched.
    void set_limits(const ExecutableLimits& limits);
    [[nodiscard]] ExecutableStats stats() const;
    // The counts in Prometheus's text format, with these labels on every sample. The labels `state` and `what` are the library's own.
    [[nodiscard]] std::string prometheus(const std::vector<std::pair<std::string, std::string>>& labels = {}) const;

private:
    friend class CapturedGraph;
    friend class CaptureScope;
    friend class Template;
    struct State;
    std::unique_ptr<State> state_;
};

// How to capture.
struct CaptureOptions {
    Route route = Route::blocks;
    // What becomes of tensors that are live when the capture ends.
    Retain retain = Retain::inherit;
    // Fill kernels of torch's stand in the place of memset nodes, which CUDA launches one by one: a graph's launch costs the host a
    // microsecond less for each (docs/performance.md). Results are the same.
    bool memset_kernels = true;
    // The pool of its executables; null: ExecutablePool::of(arena).
    std::shared_ptr<ExecutablePool> executables = nullptr;
    // What a body draws random numbers from besides torch's default generator of the device: every replay draws anew and moves them on, as
    // it does that one. Each is of the arena's device, and none of another capture that is under way. Where torch finds them out by
    // itself (2.14 and later), whether they are named makes no difference; before, to draw from one that is not is torch's own error.
    std::vector<std::shared_ptr<const at::Generator>> generators{};
    // What the captured shape is called: Space::set_label, from the capture's beginning on.
    std::string label{};
    // A ring whose units the body acquires and releases (UnitScope with the capture's stream), each that streams once, in the order of use: they are
    // copied within the graph then, beside its kernels, from what their sources are at each replay. Of the arena's device. It may go before
    // the graph, whose executable is its own. Not with next_piece().
    Ring* ring = nullptr;
    RingCaptureOptions ring_capture{};
};

// Puts a forwarding allocator over the one torch has installed. It passes everything on, except what is allocated on a stream of a
// capture by the blocks route. Throws Error (VMMGRAPH_ERROR_WRONG_STATE) if torch's allocator is not the native one, if its caching is
// off, or if the torch that is loaded is not the release of built_for(). Twice is once.
VMMGRAPH_API void install();
// Takes it away again; throws Error if something else was installed over it, or while a capture is under way. Blocks that are
// still live stay valid and can be freed.
VMMGRAPH_API void uninstall();
// Whether the forwarding allocator is the installed one.
[[nodiscard]] VMMGRAPH_API bool installed() noexcept;
// The torch release this library was built for, as "2.11.0".
[[nodiscard]] VMMGRAPH_API const char* built_for() noexcept;

// A captured graph and the space its tensors live in. Destroying it waits for the arena's replays so far, since what a graph reads
// often goes with it; one that was moved from throws Error (VMMGRAPH_ERROR_INVALID_HANDLE) or answers 0.
//
// A tensor of the capture that is still alive keeps the pages under it and nothing else; its bytes are those of the last replay. Freed, they
// serve others once those replays are done with it, the default stream, torch's current stream where it was freed, and the streams of its
// record_stream(): note there every other one that reads it outside replays, if it may be freed before that is over.
class VMMGRAPH_API CapturedGraph {
public:
    CapturedGraph(CapturedGraph&&) noexcept;
    CapturedGraph& operator=(CapturedGraph&&) noexcept;
    ~CapturedGraph();

    // Launches the graph (or its pieces) on `stream` (a cudaStream_t), in order after every earlier replay of the arena. Any thread.
    // Throws Error (VMMGRAPH_ERROR_STREAM_CAPTURING) for a stream under capture, whose capture goes on. Where torch's current stream is one of
    // torch's own and this one, nothing is recorded; any other may be destroyed afterwards, which costs an event recorded and one waited for.
    void replay(void* stream);
    // Launches the pieces of the capture in their order, as one replay: no other graph of the arena runs between them. `between(n)` is called
    // behind the n-th piece, from 0, but the last, with torch's current stream that one, whatever the call before left; it must not replay
    // or capture in this arena, nor mark or trim it.
    void replay(void* stream, const std::function<void(std::size_t)>& between);
    // How many graphs the capture is made of: 1, and 1 for each CaptureScope::next_piece().
    [[nodiscard]] std::size_t pieces() const noexcept;
    // As Space::verify: replays twice over differently filled shared pages and compares the outputs, without what runs between pieces. A graph whose outputs change relies
    // on what other graphs left.
    [[nodiscard]] Difference verify(void* stream, const std::vector<Output>& outputs);
    // How many memset nodes became kernels.
    [[nodiscard]] std::size_t memset_kernels() const noexcept;
    // What the capture used.
    [[nodiscard]] const SealReport& report() const;
    // The space; its blocks are freed by the tensors that own them.
    [[nodiscard]] const Space& space() const;
    // The cudaGraphExec_t, of the last piece. From then on it is this graph's own as long as that lives. Throws Error if it cannot be made.
    [[nodiscard]] void* exec() const;
    // That of any piece, from 0. Throws Error (VMMGRAPH_ERROR_INVALID_ARGUMENT) too for one that is not there.
    [[nodiscard]] void* exec(std::size_t piece) const;

    // Instantiates the graph ahead of its first replay, if the pool's limits leave room without evicting a graph that was launched last or
    // instantiated since. Returns whether it has executables now. Any thread, but not beside the graph's end. Throws Error (out of memory).
    bool instantiate();
    // The same on a thread of the pool, soon; errors are logged only.
    void instantiate_soon();
    // Whether it has executables now.
    [[nodiscard]] bool is_instantiated() const;
    // Bytes of device memory that its executables take, estimated from those of its pool measured so far.
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

// One capture on the calling thread: makes the arena's device the current one, whichever was, and `stream` (a cudaStream_t of that device,
// not the default stream) torch's current stream, and begins. With the end of the capture both are again what they were. Destroying it
// without end() abandons the capture and leaves torch and the arena usable.
class VMMGRAPH_API CaptureScope {
public:
    // Throws Error: VMMGRAPH_ERROR_INVALID_ARGUMENT for a ring where torch keeps no captured graph (up to torch 2.7), the default stream, a stream, a generator or a pool of executables of another device
    // than the arena's, an arena of the host driver, or own pages by the MemPool route, VMMGRAPH_ERROR_STREAM_CAPTURING for a stream under capture, and VMMGRAPH_ERROR_WRONG_STATE before install() (blocks route)
    // or for what install() refuses. What torch throws passes.
    CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options = {});
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;
    ~CaptureScope();

    // Ends one graph and begins the next in the same space: for work between them that no graph can hold. What is live stays valid, and
    // memory that one piece freed serves the next. On failure destroy the scope; the capture is lost.
    void next_piece();

    // Whether the storage that begins there is memory of this capture, kept or not: its address stays the graph's as long as that lives,
    // whoever frees it. Everything else (general memory, the host's, another capture's) belongs to those who own it.
    [[nodiscard]] bool holds(const void* storage) const;

    // The kernel (a cudaGraphNode_t of this piece) that torch's current stream was given last in this capture, whose parameters are to change from
    // replay to replay: cudaGraphExecKernelNodeSetParams with it on CapturedGraph::exec(piece), before a replay and not beside one. The graph's
    // executables are its own from then on. Throws Error: VMMGRAPH_ERROR_WRONG_STATE where the stream was given something else last, or nothing,
    // or has several streams joined since.
    [[nodiscard]] void* last_kernel();

    // Ends the capture and seals the space. On failure destroy the scope; the capture is lost.
    [[nodiscard]] CapturedGraph end();

private:
    struct State;
    std::unique_ptr<State> state_;
};

// Captures what `body` gives to torch's current stream. What `body` throws arrives at the caller, with the capture abandoned.
template <class Body>
[[nodiscard]] CapturedGraph capture(SharedVmmAllocator& arena, void* stream, Body&& body, const CaptureOptions& options = {}) {
    CaptureScope scope(arena, stream, options);
    std::forward<Body>(body)();
    return scope.end();
}

// While it lives, tensors that its thread allocates in a capture by the blocks route are kept blocks (Space::allocate_kept): those of all
// graphs of the arena lie packed on common pages, each on bytes of its own, so that an output of a few KiB does not cost a page. May be
// nested; to be destroyed on its thread. It changes nothing outside captures, by the MemPool route, where torch places tensors in its
// segments, and for tensors that other threads allocate.
//
//   at::Tensor logits;
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] {
//       const auto hidden = model(input);                                          // passes
//       const vmmgraph::torch::KeptScope kept;
//       logits = hidden.clone();                                                   // stays
//   });
//
// Only for what stays: a kept block's bytes serve nobody else before its tensor and its graph are gone, also if the tensor goes during the
// capture. So put the operation that makes the output into the scope, and what leads to it outside. Retain does not matter to it.
class VMMGRAPH_API KeptScope {
public:
    KeptScope() noexcept;
    KeptScope(const KeptScope&) = delete;
    KeptScope& operator=(const KeptScope&) = delete;
    ~KeptScope();

    // Whether this thread is in one.
    [[nodiscard]] static bool active() noexcept;
};

// While it lives, tensors that its thread allocates in a capture by the blocks route are remote blocks (Space::allocate_remote): buffers that
// peers read or write by their pages, as those of collectives that NCCL registers in the capture, or that an engine exports after it
// (share.hpp). If they are freed before the capture ends, its seal exchanges none of their pages; and each lies on one page or on whole ones. May be
// nested; of it and KeptScope the innermost counts; to be destroyed on its thread. It changes nothing outside captures, by the MemPool route, and for
// tensors that other threads allocate.
//
//   CaptureOptions options;
//   options.retain = vmmgraph::Retain::shared_remote;
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] {
//       at::Tensor partial;
//       {
//           const vmmgraph::torch::RemoteScope remote;
//           partial = at::mm(x, weight);                                               // NCCL may register it
//       }
//       all_reduce(partial);
//       output = partial + residual;                                                   // stays, as it always does
//   }, options);
//
// Captures with NCCL's collectives are sealed in place, since nobody knows their buffers, and refused where that cannot be. With
// Retain::shared_remote the program says that it has marked all of them: then the seal leaves alone what was made in a RemoteScope and gives everything else that
// stays pages of its own. A capture in which nothing was marked is sealed in place for all that. A buffer that is alive at the end stays on shared
// pages: copy it out.
class VMMGRAPH_API RemoteScope {
public:
    RemoteScope() noexcept;
    RemoteScope(const RemoteScope&) = delete;
    RemoteScope& operator=(const RemoteScope&) = delete;
    ~RemoteScope();

    // Whether this thread is in one, and in no KeptScope inside it.
    [[nodiscard]] static bool active() noexcept;

private:
    std::size_t around_;
};

// For engines that keep their own MemPool and CUDAGraph: an allocator for a MemPool, whose segments are blocks of one space. Open a
// bump space and make an allocator and a MemPool for each capture, seal it when the capture has ended, and launch through Space::replay.
// Keep the space as long as its graph. The allocator may outlive it: it keeps the segments that torch has, which can be given back at
// any time, and hands out no more (an Error).
//
// Any thread. Out of memory is null to torch, which makes its own error of it. Throws Error for a moved-from space, and if the
// torch that is loaded is not the release of built_for().
//
// What torch asks of its user, here too: up to 2.10 a MemPool does not own its allocator, so keep it until the pool, its graphs and
// their tensors are gone; up to 2.7 a MemPoolContext must stand on the capturing thread for the whole capture; destroy no pool while
// a capture is under way; call at::cuda::clearCublasWorkspaces() before and after each capture, or cuBLAS carries a workspace
// from one graph's shared pages into the next graph.
[[nodiscard]] VMMGRAPH_API std::shared_ptr<TorchAllocator> make_allocator(const Space& space);

// The same for engines whose captures are strictly serial, with one allocator for all of them: a segment is a block of the space that
// is current when torch asks for it. It keeps the arena alive. Throws Error for null too.
//
//   auto arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
//   auto allocator = vmmgraph::torch::make_allocator(arena);
//   for each shape:
//     arena->switch_to_new_virtual_space();
//     at::cuda::MemPool pool(allocator);                  // a new one: torch reuses the segments of one it has
//     graph.capture_begin(pool.id(), …); …; graph.capture_end();
//
// The engine also orders its replays: no two graphs of the arena may run at once.
[[nodiscard]] VMMGRAPH_API std::shared_ptr<TorchAllocator> make_allocator(std::shared_ptr<SharedVmmAllocator> arena);

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_HPP
