// Graph group: a capture session of torch graphs that belong to the program.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <vmmgraph/torch_c.h>
#include <vmmgraph/torch_region.hpp>

#include "on_device.hpp"
#include "session.hpp"

namespace vmmgraph::torch {

// All functions throw Error and pass torch's exceptions on. Thread-safe, except begin() and
// begun(), which run on one thread.
class GraphGroup {
public:
    explicit GraphGroup(SharedVmmAllocator& arena) : session_(arena) {}
    GraphGroup(const GraphGroup&) = delete;
    GraphGroup& operator=(const GraphGroup&) = delete;
    ~GraphGroup();

    // Call before and after torch's capture_begin(). begun() withdraws an announcement torch did
    // not use.
    void begin(const compat::PoolId& pool, bool free_workspace);
    void begun();
    void end(const vmmgraph_torch_graph_t& graph, vmmgraph_torch_captured_t& captured);
    void abandon(const compat::PoolId& pool) noexcept;

    const SealReport& seal(Retain retain, Written written);
    void replay(std::size_t piece);
    // Instantiates all pieces of a sealed group. Returns whether executables exist.
    bool instantiate();
    Difference verify(std::size_t piece, const std::vector<Output>& outputs);
    // The program may launch the graphs on its own from now on.
    void launched_by_hand();
    // `keep`: torch makes the piece's executable from now on; otherwise the graph is removed.
    void drop(std::size_t piece, bool keep);

    [[nodiscard]] const Space& space() const noexcept { return session_.space(); }

private:
    struct Piece {
        // Null after drop(), or if the owner replays the graph.
        at::cuda::CUDAGraph* graph;
        // Null if torch makes the executable.
        cudaGraph_t lends;
        std::size_t place = 0;
    };
    // From begin() to begun(), while torch's capture_begin() runs.
    struct Beginning {
        Relaxed relaxed;
        DisableScope torchs_own;
    };

    [[nodiscard]] c10::cuda::CUDAStream stream() const {
        return c10::cuda::getCurrentCUDAStream(session_.device().index());
    }
    void require_capture() const;
    void launch(std::size_t piece, const c10::cuda::CUDAStream& stream);
    // Prepares the workspace for a launch on the stream, or for the program's launches (null).
    // Releases the mutex to ask for memory.
    void use_workspace(std::unique_lock<std::mutex>& lock, const c10::cuda::CUDAStream* stream);
    const Piece& replayable(std::size_t piece) const;
    std::vector<cudaGraph_t> lending();

    // Held during launches, which the arena serialises. Never held while waiting for a replay slot:
    // its thread may destroy a graph.
    std::mutex mutex_;
    CaptureSession session_;
    std::vector<Piece> pieces_;
    std::optional<Beginning> beginning_;
    // True if the program launches some graphs without replay().
    bool by_hand_ = false;
    // True after a replay on a stream that may be destroyed.
    std::atomic<bool> waits_{false};
};

}  // namespace vmmgraph::torch
