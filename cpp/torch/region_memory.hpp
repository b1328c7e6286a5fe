// A region as a block owner. Wraps the Rust object, which lives as long as any tensor in the
// region.
#pragma once

#include <cstddef>

#include "block_owner.hpp"
#include "rust/cxx.h"
#include "vmmgraph-bridge/src/region.rs.h"
#include <vmmgraph/region.hpp>

namespace vmmgraph::torch {

class RegionMemory final : public BlockOwner {
public:
    // Throws Error for a moved-from region.
    explicit RegionMemory(const Region& region) try
        : region_(bridge::torch_region(reinterpret_cast<std::size_t>(region.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // CUDA device of the region; -1 for a different driver.
    [[nodiscard]] int cuda_device() const { return bridge::cuda_device_of(*region_); }

    // Allocates a block. Returns null when out of memory; throws Error otherwise, for example if
    // paused.
    void* allocate(std::size_t bytes, Policy policy, void* stream) {
        std::size_t block = 0;
        const auto status =
            bridge::allocate_in_region(*region_, bytes, static_cast<std::int32_t>(policy),
                                       reinterpret_cast<std::size_t>(stream), block);
        if (is_out_of_memory(status)) {
            return nullptr;
        }
        detail::check(status);
        return reinterpret_cast<void*>(block);
    }

    vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept override {
        return bridge::release_to_region(*region_, reinterpret_cast<std::size_t>(block),
                                         reinterpret_cast<std::size_t>(current_stream(device)));
    }

    void record_stream(void* block, void* stream) override {
        detail::check(bridge::record_stream_in_region(
            *region_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(stream)));
    }

private:
    rust::Box<bridge::TorchRegion> region_;
};

}  // namespace vmmgraph::torch
