// Graph group: one space and the torch graphs captured into it, which the program owns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_region.hpp>

#include "compat.hpp"
#include "executables.hpp"
#include "memory.hpp"
#include "on_device.hpp"
#include "segments.hpp"
#include "workspace.hpp"

namespace vmmgraph::torch {

// A graph after its capture, as described by its owner.
struct ForeignGraph {
    at::cuda::CUDAGraph* graph;
    compat::PoolId pool;
    cudaGraph_t raw;
    bool lend;
    bool memset_kernels;
};

// Index of a graph in its group, and properties of the capture.
struct ForeignPiece {
    std::size_t number;
    std::size_t memset_kernels;
    bool replayable;
    bool lent;
};

// Whether the program wrote to tensors of the group since their captures.
enum class Written { no, perhaps };

// All functions throw Error and pass torch's exceptions on. Thread-safe, except begin() and
// begun(), which run on one thread.
class GraphGroup {
public:
    explicit GraphGroup(SharedVmmAllocator& arena);
    GraphGroup(const GraphGroup&) = delete;
    GraphGroup& operator=(const GraphGroup&) = delete;
    ~GraphGroup();

    // Call before and after torch's capture_begin(). begun() withdraws an announcement torch did
    // not use.
    void begin(const compat::PoolId& pool);
    void begun();
    ForeignPiece end(const ForeignGraph& graph);
    void abandon(const compat::PoolId& pool) noexcept;

    SealReport seal(Retain retain, Written written);
    void replay(std::size_t piece);
    // Instantiates all pieces of a sealed group. Returns whether executables exist.
    bool instantiate();
    Difference verify(std::size_t piece, const std::vector<Output>& outputs);
    // The program may launch the graphs on its own from now on.
    void launched_by_hand();
    // `keep`: torch makes the piece's executable from now on; otherwise the graph is removed.
    void drop(std::size_t piece, bool keep);

    [[nodiscard]] const Space& space() const noexcept { return space_; }

private:
    struct Piece {
        // Null after drop(), or if the owner replays the graph.
        at::cuda::CUDAGraph* graph;
        // Null if torch makes the executable.
        cudaGraph_t lends;
        std::size_t place = 0;
    };

    // Guards of a running capture.
    struct UnderWay {
        c10::cuda::CUDAStream stream;
        CaptureUnderWay counted;
        WorkspaceTable workspaces;
        std::optional<Relaxed> relaxed;
        std::optional<DisableScope> torchs_own;
        UnderWay(c10::DeviceIndex device, const c10::cuda::CUDAStream& stream, Workspace& workspace);
    };

    [[nodiscard]] c10::cuda::CUDAStream stream() const;
    void launch(std::size_t piece, const c10::cuda::CUDAStream& stream);
    // Prepares the workspace for a launch on the stream, or for the program's launches (null).
    // Releases the mutex to ask for memory.
    void use_workspace(std::unique_lock<std::mutex>& lock, const c10::cuda::CUDAStream* stream);
    [[nodiscard]] Retain policy(Retain asked) const;
    SealReport seal_keeping_contents(Retain retain);
    const Piece& replayable(std::size_t piece) const;
    std::vector<cudaGraph_t> lending();
    Template& executables();

    c10::DeviceIndex device_;
    Space space_;
    std::shared_ptr<Memory> memory_;
    std::shared_ptr<Workspace> workspace_;
    std::shared_ptr<ExecutablePool> pool_;

    // Held during launches, which the arena serialises. Never held while waiting for a replay slot:
    // its thread may destroy a graph.
    std::mutex mutex_;
    std::vector<KeptWorkspace> kept_workspaces_;
    std::vector<Piece> pieces_;
    std::unique_ptr<UnderWay> under_way_;
    // Null before the first replay and after drop() of a piece.
    std::unique_ptr<Template> template_;
    std::optional<SealReport> sealed_;
    bool collectives_ = false;
    // True if the program launches some graphs without replay().
    bool by_hand_ = false;
    // Captured streams that exist as long as the process.
    std::set<cudaStream_t> captured_on_;
    LastStream last_stream_;
    // True after a replay on a stream that may be destroyed.
    std::atomic<bool> waits_{false};
};

}  // namespace vmmgraph::torch
