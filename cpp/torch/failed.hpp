// Clean-up after a failed capture.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "compat.hpp"
#include "on_device.hpp"

namespace vmmgraph::torch {

using Generators = std::vector<std::shared_ptr<const at::Generator>>;

// Up to torch 2.12, generators of a capture without a regular end stay in capture state, and random
// numbers fail. An empty capture resets them.
inline void reset_generators(const c10::cuda::CUDAStream& stream,
                             const Generators& generators) noexcept {
    try {
        const c10::cuda::CUDAStreamGuard guard(stream);
        compat::Graph graph;
        for (const auto& generator : generators) {
            graph.draw_from(*generator);
        }
        graph.capture_begin(at::cuda::graph_pool_handle(), cudaStreamCaptureModeThreadLocal);
        static_cast<void>(compat::capture_nothing(stream.stream()));
        graph.end(stream.stream());
    } catch (...) {
        // The device cannot capture.
    }
}

// Ends a stream's capture in any state, and clears the CUDA error of the capture.
inline void end_by_hand(cudaStream_t stream) noexcept {
    cudaGraph_t partial = nullptr;
    if (is_capturing(stream)) {
        static_cast<void>(cudaStreamEndCapture(stream, &partial));
    }
    if (partial != nullptr) {
        static_cast<void>(cudaGraphDestroy(partial));
    }
    // Torch checks for a sticky error at its next allocation.
    static_cast<void>(cudaGetLastError());
}

}  // namespace vmmgraph::torch
