// Capture session: the space of a graph group, the captures into this space, and the executables of
// the captured graphs.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <vmmgraph/torch.hpp>

#include "compat.hpp"
#include "executables.hpp"
#include "failed.hpp"
#include "memory.hpp"
#include "on_device.hpp"
#include "registry.hpp"
#include "segments.hpp"
#include "workspace.hpp"

namespace vmmgraph::torch {

// Whether the program wrote to tensors of the session since their captures.
enum class Written { no, perhaps };

// One capture at a time: begin(), one or more pieces, leave(), seal(). After an exception:
// abandon(). CaptureScope captures its own graphs, GraphGroup the program's graphs. Callers make
// the device current, and hold Relaxed and DisableScope. Not thread-safe. Functions throw Error and
// pass torch's exceptions on.
class CaptureSession {
public:
    // Without a route: session of the program's graphs, by the blocks route. `executables` null:
    // the device's pool.
    explicit CaptureSession(SharedVmmAllocator& arena, std::optional<Route> route = std::nullopt,
                            std::shared_ptr<ExecutablePool> executables = nullptr);
    CaptureSession(const CaptureSession&) = delete;
    CaptureSession& operator=(const CaptureSession&) = delete;
    ~CaptureSession() { registry::forget_capture(memory_.get()); }

    // Throws Error unless a capture by the route is possible, and initialises CUDA.
    static void require_ready(Route route);
    // Begins a capture on the stream: guards, workspaces, and the pool of the MemPool route.
    // `free_workspace`: see WorkspaceTable.
    void begin(const c10::cuda::CUDAStream& stream, bool free_workspace = false);
    [[nodiscard]] bool is_capturing() const noexcept { return running_ != nullptr; }
    // Returns the pool of CaptureScope's next piece.
    compat::PoolId begin_piece();
    // Call after torch has ended a piece's capture. Replaces its memset nodes; returns how many.
    std::size_t end_piece(cudaGraph_t graph, bool memset_kernels);
    // Ends the capture. The guards end with the returned object.
    auto leave() noexcept {
        registry::forget_capture(memory_.get());
        return std::move(running_);
    }
    // Restores torch's cuBLAS workspaces, and keeps those used by the graphs.
    void keep_workspaces();
    // Ends guards and restores workspaces without a result.
    void cancel() noexcept;
    // Ends the rest of a failed capture into the pool, so torch and the arena stay usable. Destroys
    // the piece's graph, if given. `end` ends the capture as torch does, or returns false. Does
    // nothing without a running capture.
    void abandon(
        const compat::PoolId& pool, std::unique_ptr<compat::Graph>* graph = nullptr,
        const Generators& generators = {},
        const std::function<bool()>& end = [] { return false; }) noexcept;

    // Seals the space once, and then returns the same report.
    SealReport& seal(Retain retain, Written written);
    [[nodiscard]] bool is_sealed() const noexcept { return report_.has_value(); }
    [[nodiscard]] const SealReport& report() const { return *report_; }

    // Returns the executables, adding the graphs to the pool first if needed.
    Template& executables(const std::vector<cudaGraph_t>& graphs, bool pinned);
    // Null before, and after close_executables(), which must precede the graphs' destruction.
    [[nodiscard]] const std::shared_ptr<Template>& executables() const noexcept {
        return template_;
    }
    void close_executables() noexcept;
    [[nodiscard]] const ExecutablePool& executable_pool() const noexcept { return *executables_; }

    // Records a launch. Returns whether the stream exists as long as the process.
    bool launched_on(const c10::cuda::CUDAStream& stream) noexcept {
        return last_stream_.note(stream);
    }
    // Tells torch about the last launch that uses the workspaces.
    void leave_workspaces() noexcept {
        workspace_->leave(*memory_, last_stream_, kept_workspaces_);
    }
    // Destroys the pool of the MemPool route, after its graphs.
    void bury_pool() { bury(std::move(segments_)); }

    [[nodiscard]] c10::Device device() const noexcept { return device_; }
    [[nodiscard]] Space& space() noexcept { return space_; }
    [[nodiscard]] const Space& space() const noexcept { return space_; }
    [[nodiscard]] const std::shared_ptr<Memory>& memory() const noexcept { return memory_; }
    [[nodiscard]] Workspace& workspace() noexcept { return *workspace_; }

private:
    // Guards of the running capture.
    struct Running {
        explicit Running(const c10::cuda::CUDAStream& on) : stream(on) {}
        c10::cuda::CUDAStream stream;
        std::optional<c10::cuda::CUDAStreamGuard> guard;
        std::optional<compat::PoolContext> context;
        std::optional<CaptureUnderWay> counted;
    };

    // Returns true if torch still counted a use of the pool.
    bool give_pool_back(const compat::PoolId& pool);
    SealReport seal_with_contents(Retain retain);

    c10::Device device_;
    bool of_program_;
    Route route_;
    Space space_;
    std::shared_ptr<Memory> memory_;
    SegmentPool segments_;
    std::shared_ptr<Workspace> workspace_;
    std::vector<KeptWorkspace> kept_workspaces_;
    std::shared_ptr<ExecutablePool> executables_;
    std::shared_ptr<Template> template_;
    std::optional<SealReport> report_;
    // True if NCCL may have registered pages of a capture.
    bool collectives_ = false;
    // Uses of the MemPool route's pool before the piece.
    int uses_before_ = 0;
    // Captured streams of the program that exist as long as the process.
    std::set<cudaStream_t> captured_on_;
    LastStream last_stream_;
    std::optional<WorkspaceTable> workspaces_;
    std::unique_ptr<Running> running_;
};

}  // namespace vmmgraph::torch
