// One space and the graphs of torch's that were captured into it, which their owners keep: what the C functions of torch_c.h come down to.
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

// A graph whose capture has ended, as its owner describes it.
struct ForeignGraph {
    at::cuda::CUDAGraph* graph;
    compat::PoolId pool;
    cudaGraph_t raw;
    bool lend;
    bool memset_kernels;
};

// Its number in its shape, and what became of it.
struct ForeignPiece {
    std::size_t number;
    std::size_t memset_kernels;
    bool replayable;
    bool lent;
};

// Whether a program has written to the tensors of a shape since their captures.
enum class Written { no, perhaps };

// All functions throw Error, and what torch throws passes. Any thread, but begin() and begun(), which are called on one.
class Shape {
public:
    explicit Shape(SharedVmmAllocator& arena);
    Shape(const Shape&) = delete;
    Shape& operator=(const Shape&) = delete;
    ~Shape();

    // Around torch's capture_begin(): the first announces the space, the second takes that back if it was not asked for.
    void begin(const compat::PoolId& pool);
    void begun();
    ForeignPiece end(const ForeignGraph& graph);
    // Also where nothing began.
    void abandon(const compat::PoolId& pool) noexcept;

    SealReport seal(Retain retain, Written written);
    void replay(std::size_t piece);
    // Ahead of the first replay, of all pieces; whether they have executables now. Sealed shapes only.
    bool instantiate();
    Difference verify(std::size_t piece, const std::vector<Output>& outputs);
    // Others may launch its graphs from now on, and tell nobody.
    void launched_by_hand();
    // Its executable is torch's own from now on (keep), or it goes.
    void drop(std::size_t piece, bool keep);

    [[nodiscard]] const Space& space() const noexcept { return space_; }

private:
    struct Piece {
        // Null: its owner replays it, or it is gone.
        at::cuda::CUDAGraph* graph;
        // Null: torch makes its executable.
        cudaGraph_t lends;
        // Its place among those that borrow, while there is a template.
        std::size_t place = 0;
    };

    // One capture that is under way: what stands around torch's own work at its beginning, and what stands until its end.
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
    // Before a launch on the stream, or by others (null). The mutex is held, but while others are asked for memory.
    void use_workspace(std::unique_lock<std::mutex>& lock, const c10::cuda::CUDAStream* stream);
    [[nodiscard]] Retain policy(Retain asked) const;
    SealReport seal_keeping_contents(Retain retain);
    // With the mutex held.
    const Piece& replayable(std::size_t piece) const;
    // The graphs of the pieces that borrow, in their places.
    std::vector<cudaGraph_t> lending();
    Template& executables();

    c10::DeviceIndex device_;
    Space space_;
    std::shared_ptr<Memory> memory_;
    std::shared_ptr<Workspace> workspace_;
    std::shared_ptr<ExecutablePool> pool_;

    // Held during launches, which the arena's order keeps apart anyway, and never while waiting for a turn: what ends a graph may run on a
    // thread that has one.
    std::mutex mutex_;
    std::vector<KeptWorkspace> kept_workspaces_;
    std::vector<Piece> pieces_;
    std::unique_ptr<UnderWay> under_way_;
    // Of all pieces that borrow; null before the first replay and where one of them went.
    std::unique_ptr<Template> template_;
    std::optional<SealReport> sealed_;
    bool collectives_ = false;
    // Somebody else than replay() launches some of its graphs.
    bool by_hand_ = false;
    // The streams that were captured, of those that last.
    std::set<cudaStream_t> captured_on_;
    LastStream last_stream_;
    // Some replay was on one that does not last.
    std::atomic<bool> waits_{false};
};

}  // namespace vmmgraph::torch
