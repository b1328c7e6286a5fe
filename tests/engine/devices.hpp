// Device of the engine tests: the GPU if present.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
inline c10::Device device(c10::DeviceIndex index = 0) {
    return has_gpu() ? c10::Device(c10::kCUDA, index) : c10::Device(c10::kCPU);
}
inline at::TensorOptions on_device(c10::ScalarType dtype, c10::DeviceIndex index = 0) {
    return at::TensorOptions().dtype(dtype).device(device(index));
}

#define NEEDS_A_GPU()                  \
    if (!has_gpu()) {                  \
        GTEST_SKIP() << "needs a GPU"; \
    }

// Shared by all tests, so never left under capture.
inline void* stream(c10::DeviceIndex index = 0) {
    if (!has_gpu()) {
        return nullptr;
    }
    static std::mutex mutex;
    static std::map<c10::DeviceIndex, c10::cuda::CUDAStream> streams;
    const std::lock_guard lock(mutex);
    const auto known = streams.find(index);
    return (known != streams.end()
                ? known
                : streams.emplace(index, c10::cuda::getStreamFromPool(true, index)).first)
        ->second.stream();
}

class OnStream {
public:
    explicit OnStream(c10::DeviceIndex index = 0) {
        if (has_gpu()) {
            guard_.reset_stream(
                c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream(index)), index));
        }
    }

private:
    c10::cuda::OptionalCUDAStreamGuard guard_;
};

inline void wait(c10::DeviceIndex index = 0) {
    if (has_gpu()) {
        const c10::cuda::CUDAGuard guard(index);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
}

// A device wait would break another thread's capture.
inline void wait_for_stream(c10::DeviceIndex index = 0) {
    if (has_gpu()) {
        const c10::cuda::CUDAGuard guard(index);
        ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(stream(index))), cudaSuccess);
    }
}

// Blocks a stream until destroyed.
class Gate {
public:
    explicit Gate(cudaStream_t stream) {
        // May run after the Gate's destruction.
        const auto wait = [](void* user) {
            const std::unique_ptr<Open> open(static_cast<Open*>(user));
            while (!(*open)->load()) {
            }
        };
        EXPECT_EQ(cudaLaunchHostFunc(stream, wait, new Open(open_)), cudaSuccess);
    }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    ~Gate() { open(); }
    void open() { *open_ = true; }

private:
    using Open = std::shared_ptr<std::atomic<bool>>;
    Open open_ = std::make_shared<std::atomic<bool>>(false);
};

// At most VMMGRAPH_ENGINE_STEPS steps. A shortened test skips some checks.
inline int most_steps(int steps) {
    const char* const text = std::getenv("VMMGRAPH_ENGINE_STEPS");
    const int most = text == nullptr ? 0 : std::atoi(text);
    return most > 0 ? std::min(most, steps) : steps;
}
inline bool shortened() {
    return most_steps(std::numeric_limits<int>::max()) < std::numeric_limits<int>::max();
}

// Returns the refusal's message, or empty.
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
