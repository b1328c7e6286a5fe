// Collectives of NCCL in captured graphs, of whose buffers NCCL may have taken hold.
#pragma once

#include <cuda_runtime_api.h>

#include <vmmgraph/arena.hpp>

namespace vmmgraph::torch {

// Whether the graph has kernels of NCCL that may write through mappings of their own: NCCL registers the buffers of captured collectives
// (unless NCCL_GRAPH_REGISTER=0), and can where this process uses several devices, or where its pages are `shareable`. Else other processes
// have no handle that they could open, and it uses buffers of its own.
bool has_registered_collectives(cudaGraph_t graph, bool shareable);

// How such a capture is sealed. Of what NCCL has registered every page has to stay, or a peer would go on with the one that was there. `marked`:
// remote blocks were made in it; who asks for shared_remote as well says that all the buffers were, and then nothing else has to.
inline Retain with_collectives(Retain asked, bool marked) {
    const bool exchanges = asked == Retain::own_pages || (asked == Retain::shared_remote && !marked);
    return exchanges ? Retain::in_place : asked;
}

}  // namespace vmmgraph::torch
