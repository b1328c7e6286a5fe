#include "guards.hpp"

#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include "compat.hpp"
#include "on_device.hpp"
#include "release.hpp"
#include "rust/cxx.h"
#include "vmmgraph-bridge/src/device.rs.h"

// Source of at::show_config(), which also queries devices; a process with CUDA initialised cannot
// fork workers (vLLM's main process). Weak: without it the release is not checked.
namespace caffe2 {
__attribute__((weak)) const std::map<std::string, std::string>& GetBuildOptions();
}

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Release of the loaded torch, as "2.11.0"; empty if unknown.
std::string loaded_release() {
    if (caffe2::GetBuildOptions == nullptr) {
        return {};
    }
    const auto& settings = caffe2::GetBuildOptions();
    const auto found = settings.find("TORCH_VERSION");
    return found == settings.end() ? std::string() : found->second;
}

}  // namespace

void require_release() {
    require_one_core();
    static const std::string loaded = loaded_release();
    if (!loaded.empty() && !serves(TORCH_VERSION, loaded)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot work with torch " + loaded +
                   ": this library is built for torch " TORCH_VERSION
                   "; build libvmmgraph_torch against the loaded one (vmmgraph build)");
    }
}

void require_native_allocator() {
    auto* const allocator = caching::get();
    if (allocator == nullptr || allocator->name() != "native") {
        refuse(
            VMMGRAPH_ERROR_WRONG_STATE,
            "cannot work over torch's allocator: it is " +
                (allocator == nullptr ? "missing" : allocator->name()) +
                " and must be the native one; unset backend:cudaMallocAsync and custom allocators");
    }
    // Any value of the variable overrides isEnabled().
    if (!allocator->isEnabled() || std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot work over torch's allocator: caching is off, so captures ask no allocator; "
               "unset PYTORCH_NO_CUDA_MEMORY_CACHING");
    }
}

void require_pools_with_allocators() {
    if (compat::pool_fails_with_expandable_segments &&
        caching::CUDAAllocatorConfig::expandable_segments()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture by the MemPool route: in torch " TORCH_VERSION
               " expandable_segments bypass a MemPool's allocator; turn this setting off, or use "
               "the blocks route");
    }
}

c10::Device device_of(const SharedVmmAllocator& arena) {
    int device = -1;
    try {
        device = bridge::cuda_device(reinterpret_cast<std::size_t>(arena.handle()));
    } catch (const rust::Error& error) {
        refuse(VMMGRAPH_ERROR_INVALID_HANDLE, error.what());
    }
    if (device < 0) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot use the arena: it is on the host driver, and torch's memory on CUDA; make "
               "the arena on a CUDA device");
    }
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)};
}

void require_not_capturing(void* stream) {
    if (is_capturing(static_cast<cudaStream_t>(stream))) {
        refuse(VMMGRAPH_ERROR_STREAM_CAPTURING,
               "cannot begin on the stream: the stream is under capture; end that capture first");
    }
}

void require_stream_of(c10::Device device, void* stream) {
    const OnDevice current(device);
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    // Up to CUDA 12.7 a stream's device cannot be queried, but events are only recorded on streams
    // of their own device.
    const auto recorded = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
    C10_CUDA_IGNORE_ERROR(recorded);
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event));
    if (recorded != cudaSuccess) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot use the stream: it does not belong to the arena's device (" +
                   std::string(cudaGetErrorString(recorded)) + "); pass a stream of " +
                   device.str());
    }
}

}  // namespace vmmgraph::torch
