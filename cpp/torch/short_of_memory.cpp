#include "short_of_memory.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "rust/cxx.h"
#include "vmmgraph/src/bridge/device.rs.h"

namespace vmmgraph::torch {
namespace {

// As long as an allocation of ours waits for others before it fails.
constexpr std::uint64_t patience_ms = 2000;

// Torch calls this whenever its cache has no room, before it asks the driver, with its lock held, and does not say for how much: so it
// must be quick, and waits for nothing. Few idle pages beside much free memory stay: the next capture takes them without a call to
// the driver.
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
        // Torch then looks into its cache again, where nothing has come: its own next step finds the memory.
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
        // Not when the library is loaded: for a name that is taken already, by another copy of it, torch would end the process.
        auto* const callbacks = c10::FreeCudaMemoryCallbacksRegistry();
        if (!callbacks->Has("vmmgraph")) {
            callbacks->Register("vmmgraph", [] { return std::unique_ptr<c10::FreeMemoryCallback>(std::make_unique<GiveBack>()); });
        }
    });
}

void give_back_idle_pages() noexcept {
    // More than what captures of small graphs leave behind each time.
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
    // What torch asks the driver for: a segment of 20 MiB for what is shorter (c10/core/AllocatorConfig.h), else up to 2 MiB more than the tensor's.
    constexpr std::uint64_t step = 2 << 20;
    constexpr std::uint64_t endless = std::uint64_t{1} << 62;
    const std::uint64_t segment = std::max(std::min<std::uint64_t>(bytes, endless) + step, 10 * step);
    return bridge::make_room(device, segment, patience_ms);
}

}  // namespace vmmgraph::torch
