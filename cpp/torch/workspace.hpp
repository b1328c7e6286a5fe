// The workspaces that torch keeps for cuBLAS, and what of them graphs have baked in.
//
// Torch allocates a workspace at the first product of a thread on a stream and keeps it in a table for later ones. Were that within a
// capture, the first graph's memory would stay for as long as the table has it, later graphs would bake its address in, and whoever clears
// the table (clearCublasWorkspaces) would pull it away from them. So during a capture the entries of its stream are the arena's own, and
// afterwards they are again what they were.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/torch.hpp>

#include "memory.hpp"

namespace vmmgraph::torch {

// A workspace of torch's memory that graphs may have baked in: there for as long as any of them, whoever clears torch's table.
using KeptWorkspace = std::shared_ptr<c10::DataPtr>;

// One workspace for all captures of an arena, whose replays never overlap. It stays as long as any of its graphs; another arena has
// another one, since theirs may.
class Workspace {
public:
    // The arena's; made if none of its graphs has one.
    static std::shared_ptr<Workspace> of(const SharedVmmAllocator& arena);

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // Makes it the one of this thread's products on the stream, which is torch's current one, is not under capture and has none. Does
    // nothing where torch keeps none (2.15 and later, unless it is told to).
    void provide(const c10::cuda::CUDAStream& stream);
    // A replay that uses it was launched on the stream and may not be over when it goes.
    void record_stream(const c10::cuda::CUDAStream& stream) const;

private:
    mutable std::mutex mutex_;
    KeptWorkspace memory_;
    std::size_t bytes_ = 0;
};

// Torch's table during one capture. Up to torch 2.7 it cannot be reached: there all of it is cleared before and after a capture, as torch
// advises, what a capture needs in between is its own passing memory, and graphs captured elsewhere with a workspace of the table lose it.
class WorkspaceTable {
public:
    // Takes away what is kept for the stream, until the capture has ended, and provides the arena's.
    WorkspaceTable(Workspace& workspace, const c10::cuda::CUDAStream& stream);
    WorkspaceTable(const WorkspaceTable&) = delete;
    WorkspaceTable& operator=(const WorkspaceTable&) = delete;
    // As end(), without what is kept. Never throws.
    ~WorkspaceTable();

    // The capture has ended, its space is not sealed: removes what the capture brought, on any stream and thread, and puts back what was
    // there. What other streams have is shared with the graph, which may use it.
    std::vector<KeptWorkspace> end(const Memory& memory);

private:
    void restore();

    c10::cuda::CUDAStream stream_;
    struct Saved;
    std::unique_ptr<Saved> saved_;
};

// Takes out of torch's tables the workspaces that lie where `there` says of their address: the next product on that stream gets another one. Up to
// torch 2.7 the tables are cleared. Never throws.
void forget_workspaces(const std::function<bool(const void*)>& there) noexcept;
// The same of what lies in regions, where it would step aside, and in arenas' eager memory, where it would keep pages from the graphs.
void forget_scoped_workspaces() noexcept;

}  // namespace vmmgraph::torch
