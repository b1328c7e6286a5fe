// Collectives of NCCL in captured graphs, of whose buffers NCCL may have taken hold.
#pragma once

#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

// Whether the graph has kernels of NCCL that may write through mappings of their own: NCCL registers the buffers of captured collectives
// (unless NCCL_GRAPH_REGISTER=0), and can where this process uses several devices. Between processes it cannot, since our pages have no
// handle that another process could open, and uses buffers of its own.
bool has_registered_collectives(cudaGraph_t graph);

}  // namespace vmmgraph::torch
