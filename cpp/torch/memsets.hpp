// Replaces memset nodes of a captured graph by kernel nodes.
#pragma once

#include <cstddef>

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

// Replaces memset nodes by torch's fill kernels; returns how many. CUDA launches a graph of kernels
// in one go, but stops at every memset: measured, 1.3 us for 320 kernels and 8.8 us with eight
// memsets between them (docs/performance.md). cuBLAS adds a memset for many products. Nodes stay if
// not replaceable (rows with a pitch, edges with data, no memory). `stream` must not be under
// capture.
std::size_t replace_memsets(cudaGraph_t graph, const c10::cuda::CUDAStream& stream) noexcept;

}  // namespace vmmgraph::torch
