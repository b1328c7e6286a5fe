// What is left of a capture that failed.
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

// Up to torch 2.12, a capture that was not ended in the orderly way leaves its generators in the state of a capture: random numbers
// fail from then on. An empty capture ends that.
inline void reset_generators(const c10::cuda::CUDAStream& stream, const Generators& generators) noexcept {
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
        // The device is in no state to capture.
    }
}

// Ends a stream's capture by hand, whatever state it is in, and forgets what CUDA says of it.
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
