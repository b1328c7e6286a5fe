// cuBLAS workspaces in captured graphs.
//
// Torch keeps a workspace per handle and stream in a table. A workspace allocated in a capture
// would pin memory of the first graph, and clearCublasWorkspaces() would free it under later
// graphs. During a capture the stream's entries are therefore the arena's workspace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/torch.hpp>

#include "memory.hpp"
#include "on_device.hpp"

namespace vmmgraph::torch {

// Workspace in torch's memory, alive as long as any graph that contains its address, even if
// torch's table is cleared.
using KeptWorkspace = std::shared_ptr<c10::DataPtr>;

// One workspace for all captures of an arena, shared because the arena's replays never overlap.
// Lives as long as any graph of the arena. Replays of different arenas may overlap, so each arena
// has its own.
//
// A device's first arena uses torch's memory, 32 MiB on an H200. A further arena with a single
// graph group reserves addresses instead (src/workspace.rs); graphs without a named pool have such
// arenas. All these arenas replayed on one stream share one page. So hundreds of graphs cost one
// page, and graphs on different streams may run at the same time.
class Workspace {
public:
    // Returns the arena's workspace, making one if needed. `group`: memory of a graph group
    // launched only by replays of the group.
    static std::shared_ptr<Workspace> of(const SharedVmmAllocator& arena,
                                         const std::shared_ptr<Memory>& group = nullptr);

    Workspace(c10::DeviceIndex device, std::shared_ptr<Memory> group);
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // Installs the workspace for products on `stream` with this thread's and other threads' handles
    // (autograd). `stream` must be torch's current stream, not under capture. Does nothing if torch
    // caches no workspaces (2.15 and later, unless enabled).
    void provide(const c10::cuda::CUDAStream& stream, const std::vector<void*>& others);
    // Call inside the replay slot, before a replay on the stream. No other work may use the
    // workspace. After out of memory the call can be repeated.
    vmmgraph_status_t use_on(const Memory& group, const c10::cuda::CUDAStream& stream);
    // Like use_on(), before the program's own launches on any stream.
    vmmgraph_status_t use_anywhere(const Memory& group);
    [[nodiscard]] std::size_t bytes() const;
    // Call when a graph group is destroyed: its workspaces are not reused before its replays are
    // done.
    void leave(const Memory& group, const LastStream& last,
               const std::vector<KeptWorkspace>& kept) noexcept;

private:
    struct Pages;

    // Makes a workspace of `bytes`; null if it must be torch's memory or if the request is refused.
    [[nodiscard]] std::shared_ptr<Pages> make(std::size_t bytes) const;
    // Makes the workspace usable by all captures of the arena; false if refused.
    bool keep();
    vmmgraph_status_t use(const Memory& group, std::uintptr_t stream);

    const c10::DeviceIndex device_;
    mutable std::mutex mutex_;
    // The only user; null: all captures of the arena.
    std::shared_ptr<Memory> group_;
    std::shared_ptr<Pages> pages_;
    KeptWorkspace memory_;
    std::vector<KeptWorkspace> earlier_;
    std::size_t bytes_ = 0;
    // The stream of the last use, `anywhere`, or `not_used`.
    std::atomic<std::uintptr_t> used_{not_used};

    static constexpr std::uintptr_t not_used = ~std::uintptr_t{0};
    static constexpr std::uintptr_t anywhere = not_used - 1;
};

// Torch's table during one capture. Up to torch 2.7 it is not accessible and is cleared before and
// after each capture: graphs captured elsewhere lose their workspaces.
class WorkspaceTable {
public:
    // Replaces the stream's entries by the arena's workspace. `free_workspace`: the entries are not
    // restored, and the arena's first workspace may take their memory.
    WorkspaceTable(Workspace& workspace, const c10::cuda::CUDAStream& stream,
                   bool free_workspace = false);
    WorkspaceTable(const WorkspaceTable&) = delete;
    WorkspaceTable& operator=(const WorkspaceTable&) = delete;
    // Like end(), without a result. Never throws.
    ~WorkspaceTable();

    // Call between the end of the capture and the seal. Removes workspaces made in the capture and
    // restores the previous entries. Returns shared ownership of workspaces on other streams.
    std::vector<KeptWorkspace> end(const Memory& memory);

private:
    void restore();

    c10::cuda::CUDAStream stream_;
    struct Saved;
    std::unique_ptr<Saved> saved_;
};

// Makes this thread's cuBLAS and cuDNN handles, which a capture cannot make, and a cuBLAS workspace
// for `stream`. Leaves a failure to their first use.
void make_handles(c10::Device device, void* stream) noexcept;
// Removes workspaces selected by `there` from torch's tables (up to torch 2.7 all). Never throws.
void forget_workspaces(const std::function<bool(const void*)>& there) noexcept;
// Removes workspaces in regions, which can be paused, and in arenas' eager memory, which would hold
// pages of the graphs.
void forget_scoped_workspaces() noexcept;

}  // namespace vmmgraph::torch
