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

#include <memory>
#include <string>
#include <utility>

#include "vmmgraph.hpp"

namespace vmmgraph::torch {

// How torch's allocations reach the space.
enum class Route {
    // Each tensor is a block: pages are stitched, and frees are seen. Needs install().
    blocks,
    // Stock torch: a MemPool asks for segments, which stay until the graph goes.
    mempool,
};

// How to capture.
struct CaptureOptions {
    Route route = Route::blocks;
    // What becomes of tensors that are live when the capture ends.
    Retain retain = Retain::inherit;
};

// Puts a forwarding allocator over the one torch has installed. It passes everything on, except what is allocated on a stream of a
// capture by the blocks route. Throws Error (VMMGRAPH_ERROR_WRONG_STATE) if torch's allocator is not the native one. Twice is once.
VMMGRAPH_API void install();
// Takes it away again; throws Error if something else was installed over it, or while a capture is under way. Blocks that are
// still live stay valid and can be freed.
VMMGRAPH_API void uninstall();
// Whether the forwarding allocator is the installed one.
[[nodiscard]] VMMGRAPH_API bool installed() noexcept;
// The torch release this library was built for, as "2.11.0".
[[nodiscard]] VMMGRAPH_API const char* built_for() noexcept;

// An instantiated graph and the space its tensors live in. Destroying it waits for its arena's replays.
class VMMGRAPH_API CapturedGraph {
public:
    CapturedGraph(CapturedGraph&&) noexcept;
    CapturedGraph& operator=(CapturedGraph&&) noexcept;
    ~CapturedGraph();

    // Launches the graph on `stream` (a cudaStream_t), in order after every earlier replay of the arena. Any thread.
    void replay(void* stream);
    // What the capture used.
    [[nodiscard]] const SealReport& report() const noexcept;
    // The space; its blocks are freed by the tensors that own them.
    [[nodiscard]] const Space& space() const noexcept;
    // The cudaGraphExec_t.
    [[nodiscard]] void* exec() const;

private:
    friend class CaptureScope;
    struct State;
    explicit CapturedGraph(std::unique_ptr<State> state) noexcept;
    std::unique_ptr<State> state_;
};

// One capture on the calling thread: makes `stream` (a cudaStream_t, not the default stream) torch's current stream and begins. Destroying
// it without end() abandons the capture and leaves torch and the arena usable.
class VMMGRAPH_API CaptureScope {
public:
    CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options = {});
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;
    ~CaptureScope();

    // Ends the capture, seals the space and instantiates the graph.
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

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_HPP
