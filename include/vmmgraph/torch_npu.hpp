// VmmGraph for torch_npu, the torch of Ascend's NPUs: captures whose tensors live in a space. Link VmmGraph::torch_npu.
//
//   vmmgraph::SharedVmmAllocator arena(0);              // with VMMGRAPH_DRIVER=ascend
//   vmmgraph::torch_npu::install();
//   vmmgraph::torch_npu::CaptureScope scope(arena);  // on torch_npu's current stream
//   logits.copy_(model(input));
//   auto graph = scope.end();
//   graph.replay();
//
// Built and linked against torch_npu's own wheel and run over a stand-in of CANN's runtime; never run on a device (docs/porting.md). The smallest part of
// vmmgraph/torch.hpp: no pieces, generators, rings, shared executables, regions or eager scopes. This header includes no torch header. The library behind
// it is built for one torch_npu release; built_for() names it.

#ifndef VMMGRAPH_TORCH_NPU_HPP
#define VMMGRAPH_TORCH_NPU_HPP

#include <memory>
#include <string>

#include "vmmgraph.hpp"

namespace vmmgraph::torch_npu {

// Puts a forwarding allocator over the one torch_npu has installed. It passes everything on, except what is allocated on a stream of a capture of ours.
// Throws Error (VMMGRAPH_ERROR_WRONG_STATE) if torch_npu has none yet. Twice is once.
VMMGRAPH_API void install();
// Takes it away again; throws Error if something else was installed over it, or while a capture is under way. Blocks that are still live stay
// valid and can be freed.
VMMGRAPH_API void uninstall();
// Whether the forwarding allocator is the installed one.
[[nodiscard]] VMMGRAPH_API bool installed() noexcept;
// The torch_npu release this library was built for, as "2.14.0".
[[nodiscard]] VMMGRAPH_API const char* built_for() noexcept;

// How to capture.
struct CaptureOptions {
    // What becomes of tensors that are live when the capture ends.
    Retain retain = Retain::inherit;
    // What the captured shape is called: Space::set_label, from the capture's beginning on.
    std::string label{};
};

// A captured graph and the space its tensors live in. A tensor of the capture that is still alive keeps the space, and with it the pages that the
// graph shares with others; freed, its memory serves others once the arena's replays so far are done, and torch_npu's current stream where it was freed,
// and the streams of its record_stream(). One that was moved from throws Error (VMMGRAPH_ERROR_INVALID_HANDLE).
class VMMGRAPH_API CapturedGraph {
public:
    CapturedGraph(CapturedGraph&&) noexcept;
    CapturedGraph& operator=(CapturedGraph&&) noexcept;
    ~CapturedGraph();

    // Executes the graph on torch_npu's current stream of the arena's device, in order after every earlier replay of the arena and after what torch_npu's
    // queue still holds for the stream. Any thread. Throws Error (VMMGRAPH_ERROR_STREAM_CAPTURING) for a stream under capture.
    void replay();
    // What the capture used.
    [[nodiscard]] const SealReport& report() const;
    // The space; its blocks are freed by the tensors that own them.
    [[nodiscard]] const Space& space() const;

private:
    friend class CaptureScope;
    struct State;
    explicit CapturedGraph(std::unique_ptr<State> state) noexcept;
    [[nodiscard]] State& state() const;
    std::unique_ptr<State> state_;
};

// Captures from its construction to end() on torch_npu's current stream of the arena's device. It is one of torch_npu's own, since that captures no other, and not
// the default one, and stays the current one meanwhile. Begun and ended by one thread. Without end(), the capture is abandoned.
class VMMGRAPH_API CaptureScope {
public:
    // Throws Error: the allocator is not installed, the arena is of no NPU, the default stream, one under capture already; or what torch_npu throws.
    explicit CaptureScope(SharedVmmAllocator& arena, const CaptureOptions& options = {});
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;
    ~CaptureScope();

    // Once. If it throws, the capture is abandoned.
    [[nodiscard]] CapturedGraph end();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::torch_npu

#endif  // VMMGRAPH_TORCH_NPU_HPP
