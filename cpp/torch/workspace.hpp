// The workspace cuBLAS uses in captures whose memory is shared.
#pragma once

#include <memory>

#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/torch.hpp>

#include "segments.hpp"

namespace vmmgraph::torch {

// Memory for the workspaces that torch keeps for cuBLAS, one for all captures of an arena, which never replay at the same time.
//
// Torch allocates a workspace at the first product on a stream and keeps it for later ones. Were that within a capture, it would lie
// on pages that other graphs overwrite, and later captures would bake in its address. So every capture begins without one
// (clearCublasWorkspaces), gets one here, and loses it from torch's table when it ends; the memory stays as long as any of its graphs, so
// nobody who clears the table pulls it away from them.
class Workspace {
public:
    // The arena's; made if none of its graphs has one.
    static std::shared_ptr<Workspace> of(const SharedVmmAllocator& arena);

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace();

    // Makes torch keep a workspace of this memory for products on the stream, which is torch's current one and not under capture.
    void provide(const c10::cuda::CUDAStream& stream);

private:
    SegmentPool memory_;
};

}  // namespace vmmgraph::torch
