// Memset nodes of a captured graph as kernel nodes.
#pragma once

#include <cstddef>

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

// Puts a fill kernel of torch's in the place of every memset node, and says of how many. CUDA launches a graph of kernels in one go, but
// stops at every memset: measured, 1.3 us for 320 kernels and 8.8 us with eight memsets between them (docs/performance.md), and
// cuBLAS brings one for many a product. Where a node cannot be replaced (rows with a pitch, edges with data, no memory) it
// stays. `stream` is not under capture.
std::size_t replace_memsets(cudaGraph_t graph, const c10::cuda::CUDAStream& stream) noexcept;

}  // namespace vmmgraph::torch
