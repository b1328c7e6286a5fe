// VmmGraph for torch_npu, the torch of Ascend's NPUs: captures with tensors in a space. Link
// VmmGraph::torch_npu.
//
//   vmmgraph::SharedVmmAllocator arena(0);              // with VMMGRAPH_DRIVER=ascend
//   vmmgraph::torch_npu::install();
//   vmmgraph::torch_npu::CaptureScope scope(arena);     // on torch_npu's current stream
//   logits.copy_(model(input));
//   auto graph = scope.end();
//   graph.replay();
//
// Built and linked against torch_npu's own wheel, and run over a stand-in of CANN's runtime; never
// run on a device (docs/porting.md). A subset of vmmgraph/torch.hpp: no pieces, generators, rings,
// shared executables, regions or eager scopes. This header includes no torch header. The library is
// built for one torch_npu release, named by built_for().

#ifndef VMMGRAPH_TORCH_NPU_HPP
#define VMMGRAPH_TORCH_NPU_HPP

#include <memory>
#include <string>

#include "vmmgraph.hpp"

namespace vmmgraph::torch_npu {

// Installs a forwarding allocator over torch_npu's. Only allocations on a stream under a capture of
// this library are not forwarded. Throws Error (VMMGRAPH_ERROR_WRONG_STATE) if torch_npu has no
// allocator yet. A second call does nothing.
VMMGRAPH_API void install();
// Removes the forwarding allocator. Throws Error if another allocator was installed over this one,
// or during a capture. Live blocks stay valid and can be freed.
VMMGRAPH_API void uninstall();
// Returns true if the forwarding allocator is torch_npu's current one.
[[nodiscard]] VMMGRAPH_API bool installed() noexcept;
// The torch_npu release of this build, as "2.14.0".
[[nodiscard]] VMMGRAPH_API const char* built_for() noexcept;

// Options of a capture.
struct CaptureOptions {
    // Policy for tensors still live at the end of the capture.
    Retain retain = Retain::inherit;
    // Label of the captured graph group: Space::set_label, from the beginning of the capture.
    std::string label{};
};

// A captured graph and the space with its tensors. A live tensor keeps the space, including the
// pages shared with other graphs. Freed, its memory is reused after the arena's replays so far, the
// work of torch_npu's current stream at the free, and the streams of record_stream(). A moved-from
// object throws Error (VMMGRAPH_ERROR_INVALID_HANDLE).
class VMMGRAPH_API CapturedGraph {
public:
    CapturedGraph(CapturedGraph&&) noexcept;
    CapturedGraph& operator=(CapturedGraph&&) noexcept;
    ~CapturedGraph();

    // Launches the graph on torch_npu's current stream of the arena's device, ordered after every
    // earlier replay of the arena and after torch_npu's queued work for the stream. Any thread.
    // Throws Error (VMMGRAPH_ERROR_STREAM_CAPTURING) for a stream under capture.
    void replay();
    // Memory and driver calls of the capture.
    [[nodiscard]] const SealReport& report() const;
    // The space; tensors free its blocks.
    [[nodiscard]] const Space& space() const;

private:
    friend class CaptureScope;
    struct State;
    explicit CapturedGraph(std::unique_ptr<State> state) noexcept;
    [[nodiscard]] State& state() const;
    std::unique_ptr<State> state_;
};

// Captures on torch_npu's current stream of the arena's device, from construction to end(), on one
// thread. The stream stays current, must be torch_npu's own (others cannot be captured), and not
// the default stream. Destruction without end() abandons the capture.
class VMMGRAPH_API CaptureScope {
public:
    // Throws Error if the allocator is not installed, the arena is not on an NPU, or the stream is
    // the default stream or under capture. Errors of torch_npu propagate.
    explicit CaptureScope(SharedVmmAllocator& arena, const CaptureOptions& options = {});
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;
    ~CaptureScope();

    // May be called once. On an exception the capture is abandoned.
    [[nodiscard]] CapturedGraph end();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::torch_npu

#endif  // VMMGRAPH_TORCH_NPU_HPP
