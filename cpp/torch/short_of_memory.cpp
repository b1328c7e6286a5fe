#include "short_of_memory.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "rust/cxx.h"
#include "vmmgraph-bridge/src/device.rs.h"

namespace vmmgraph::torch {
namespace {

// The same time as allocations of the library wait before failing.
constexpr std::uint64_t patience_ms = 2000;

// Called by torch with its lock held when its cache has no room, without a size. Must be fast and
// never wait. A few idle pages stay for the next capture.
class GiveBack final : public c10::FreeMemoryCallback {
public:
    bool Execute() override {
        int device = -1;
        std::size_t free = 0;
        std::size_t total = 0;
        if (cudaGetDevice(&device) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        const auto idle = bridge::idle_bytes(device);
        if (idle == 0) {
            return false;
        }
        if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        // Torch's next step, a driver allocation, finds the memory.
        if (idle > free / 8) {
            static_cast<void>(bridge::give_back(device));
        }
        return false;
    }
};

}  // namespace

void offer_idle_pages() {
    static std::once_flag once;
    std::call_once(once, [] {
        // Not at library load: torch terminates the process if a second copy registers the same
        // name.
        auto* const callbacks = c10::FreeCudaMemoryCallbacksRegistry();
        if (!callbacks->Has("vmmgraph")) {
            callbacks->Register("vmmgraph", [] {
                return std::unique_ptr<c10::FreeMemoryCallback>(std::make_unique<GiveBack>());
            });
        }
    });
}

void give_back_idle_pages() noexcept {
    // More than captures of small graphs leave idle.
    constexpr std::uint64_t few = 16 << 20;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return;
    }
    for (int device = 0; device < count; ++device) {
        static_cast<void>(bridge::give_back_above(device, few));
    }
}

bool make_room(c10::DeviceIndex device, std::size_t bytes) noexcept {
    // Size of torch's driver allocation: 20 MiB for smaller tensors (c10/core/AllocatorConfig.h),
    // else up to 2 MiB more than the tensor.
    constexpr std::uint64_t step = 2 << 20;
    constexpr std::uint64_t endless = std::uint64_t{1} << 62;
    const std::uint64_t segment =
        std::max(std::min<std::uint64_t>(bytes, endless) + step, 10 * step);
    return bridge::make_room(device, segment, patience_ms);
}

}  // namespace vmmgraph::torch
