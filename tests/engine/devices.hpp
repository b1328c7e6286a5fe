// Where the engine's tests run: on the GPU if there is one.
#pragma once

#include <string>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <vmmgraph/engine.hpp>

namespace engine_tests {

using namespace vmmgraph::engine;

inline bool has_gpu() { return c10::cuda::device_count() > 0; }
inline c10::Device device() { return has_gpu() ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU); }
inline at::TensorOptions on_device(c10::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(device()); }

// One for all tests: none of them may leave it under capture.
inline void* stream() {
    if (!has_gpu()) {
        return nullptr;
    }
    static const auto stream = c10::cuda::getStreamFromPool(true);
    return stream.stream();
}

inline void wait() {
    if (has_gpu()) {
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
}

// What the body is refused with; empty if it is not.
template <class F>
std::string refusal(F&& body, vmmgraph_status_t status = VMMGRAPH_ERROR_INVALID_ARGUMENT) {
    try {
        body();
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), status) << error.what();
        return error.what();
    }
    return "";
}

}  // namespace engine_tests
