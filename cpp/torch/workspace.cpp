#include "workspace.hpp"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace at::cuda {
// ATen/cuda/CUDAContextLight.h, which would pull in cuBLAS's headers; the handle is a pointer, and looking it up is what makes torch keep a
// workspace. Without an argument up to torch 2.11, with one since.
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle() __attribute__((weak));
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle(bool setup) __attribute__((weak));
}  // namespace at::cuda

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Torch allocates what is asked for on the stream in the pool, for as long as this lives.
class AllocateTo {
public:
    AllocateTo(c10::DeviceIndex device, compat::PoolId pool, cudaStream_t stream) : device_(device), pool_(pool), counted_(device) {
        caching::beginAllocateToPool(device, pool, [stream](cudaStream_t other) { return other == stream; });
    }
    AllocateTo(const AllocateTo&) = delete;
    AllocateTo& operator=(const AllocateTo&) = delete;
    ~AllocateTo() {
        try {
            caching::endAllocateToPool(device_, pool_);
            caching::releasePool(device_, pool_);
        } catch (...) {
            // Torch has lost the pool; there is nothing to end.
        }
    }

private:
    c10::DeviceIndex device_;
    compat::PoolId pool_;
    // As torch does.
    CaptureUnderWay counted_;
};

}  // namespace

std::shared_ptr<Workspace> Workspace::of(const SharedVmmAllocator& arena) {
    static std::mutex mutex;
    // Handles are never used twice, so an arena cannot find another's.
    static auto* const all = new std::unordered_map<vmmgraph_arena_t, std::weak_ptr<Workspace>>;
    const std::lock_guard lock(mutex);
    std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
    auto& known = (*all)[arena.handle()];
    auto workspace = known.lock();
    if (!workspace) {
        known = workspace = std::make_shared<Workspace>();
    }
    return workspace;
}

Workspace::~Workspace() { bury(std::move(memory_)); }

void Workspace::provide(const c10::cuda::CUDAStream& stream) {
    if (!memory_.pool) {
        memory_.pool = compat::make_pool(memory_.allocator);
    }
    const AllocateTo pool(stream.device_index(), memory_.pool->id(), stream.stream());
    void* (*const with_setup)(bool) = at::cuda::getCurrentCUDABlasHandle;
    void* (*const without)() = at::cuda::getCurrentCUDABlasHandle;
    if (with_setup != nullptr) {
        static_cast<void>(with_setup(true));
    } else if (without != nullptr) {
        static_cast<void>(without());
    }
}

}  // namespace vmmgraph::torch
