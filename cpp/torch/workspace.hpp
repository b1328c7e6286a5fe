// The workspaces that torch keeps for cuBLAS, and what of them graphs have baked in.
//
// Torch allocates a workspace at the first product of a thread on a stream and keeps it in a table for later ones. Were that within a
// capture, the first graph's memory would stay for as long as the table has it, later graphs would bake its address in, and whoever clears
// the table (clearCublasWorkspaces) would pull it away from them. So during a capture the entries of its stream are the arena's own, and
// afterwards they are again what they were.
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

// A workspace of torch's memory that graphs may have baked in: there for as long as any of them, whoever clears torch's table.
using KeptWorkspace = std::shared_ptr<c10::DataPtr>;

// One workspace for all captures of an arena, whose replays never overlap. It stays as long as any of its graphs; another arena has
// another one, since theirs may.
//
// It is torch's memory, 32 MiB on an H200. Of a device's second arena on it is addresses of its own over a page of all such arenas that are
// replayed on one stream (src/workspace.rs), as long as they have one shape each, as those have that a program names no pool for: hundreds of graphs
// take one page so, as torch's own that are captured on one stream do, and may run at the same time, as torch's may not.
class Workspace {
public:
    // The arena's; made if none of its graphs has one. With a shape's memory: for a capture that only replays of that shape will launch.
    static std::shared_ptr<Workspace> of(const SharedVmmAllocator& arena, const std::shared_ptr<Memory>& shape = nullptr);

    Workspace(c10::DeviceIndex device, std::shared_ptr<Memory> shape);
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // Makes it the one of this thread's products on the stream, which is torch's current one, is not under capture and has none, and of those by the
    // handles of other threads, such as autograd's: the stream has all in order. Does nothing where torch keeps none (2.15 and later, unless it is
    // told to).
    void provide(const c10::cuda::CUDAStream& stream, const std::vector<void*>& others);
    // Before a replay of a shape on the stream, within its turn, while nothing else launches or captures what uses it; the status. Out of memory: it may
    // be tried again.
    vmmgraph_status_t use_on(const Memory& shape, const c10::cuda::CUDAStream& stream);
    // The same before a shape's graphs are launched by others.
    vmmgraph_status_t use_anywhere(const Memory& shape);
    // Bytes that a page of it has.
    [[nodiscard]] std::size_t bytes() const;
    // A shape goes, whose replays may not be over: before they are, nobody else has it, nor what is kept for the shape.
    void leave(const Memory& shape, const LastStream& last, const std::vector<KeptWorkspace>& kept) noexcept;

private:
    // Its addresses and whose page is behind them.
    struct Pages;

    // Of so many bytes; null if it is to be torch's memory or cannot be had.
    [[nodiscard]] std::shared_ptr<Pages> make(std::size_t bytes) const;
    // Whether it can be any capture's of the arena.
    bool keep();
    vmmgraph_status_t use(const Memory& shape, std::uintptr_t stream);

    const c10::DeviceIndex device_;
    mutable std::mutex mutex_;
    // Whose only it is; null: all of the arena have it.
    std::shared_ptr<Memory> shape_;
    std::shared_ptr<Pages> pages_;
    KeptWorkspace memory_;
    // Of another size, that graphs have baked in.
    std::vector<KeptWorkspace> earlier_;
    std::size_t bytes_ = 0;
    // The stream that it is used on, or what stands for any; what stands for none: it was not used.
    std::atomic<std::uintptr_t> used_{not_used};

    static constexpr std::uintptr_t not_used = ~std::uintptr_t{0};
    static constexpr std::uintptr_t anywhere = not_used - 1;
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
