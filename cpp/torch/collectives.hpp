// NCCL collectives in captured graphs; NCCL may have registered their buffers.
#pragma once

#include <cuda_runtime_api.h>

#include <vmmgraph/arena.hpp>

namespace vmmgraph::torch {

// Returns true if NCCL kernels of the graph may write through NCCL's own mappings. NCCL registers
// buffers of captured collectives (unless NCCL_GRAPH_REGISTER=0) if the process uses several
// devices or its pages are `shareable`.
bool has_registered_collectives(cudaGraph_t graph, bool shareable);

// Returns the seal policy for a capture with collectives. Registered pages must stay, or a peer
// would access a replaced page. `marked`: the capture made remote blocks, and with shared_remote
// the caller states they include all registered buffers.
inline Retain with_collectives(Retain asked, bool marked) {
    const bool exchanges =
        asked == Retain::own_pages || (asked == Retain::shared_remote && !marked);
    return exchanges ? Retain::in_place : asked;
}

}  // namespace vmmgraph::torch
