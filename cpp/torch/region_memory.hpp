// A region, as the allocator sees it: a thin owner of the Rust side, which lives as long as any tensor in it.
#pragma once

#include <cstddef>

#include "block_owner.hpp"
#include "rust/cxx.h"
#include "vmmgraph/src/bridge/region.rs.h"
#include <vmmgraph/region.hpp>

namespace vmmgraph::torch {

class RegionMemory final : public BlockOwner {
public:
    // Throws Error for a region that was moved from.
    explicit RegionMemory(const Region& region) try : region_(bridge::torch_region(reinterpret_cast<std::size_t>(region.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // The number of its CUDA device; -1 if it is on one of another driver.
    [[nodiscard]] int cuda_device() const { return bridge::cuda_device_of(*region_); }

    // A block. Null when there is no memory, budget, or address for it; throws Error for everything else, such as a paused region.
    void* allocate(std::size_t bytes, Policy policy, void* stream) {
        std::size_t block = 0;
        const auto status =
            bridge::allocate_in_region(*region_, bytes, static_cast<std::int32_t>(policy), reinterpret_cast<std::size_t>(stream), block);
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
        detail::check(
            bridge::record_stream_in_region(*region_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(stream)));
    }

private:
    rust::Box<bridge::TorchRegion> region_;
};

}  // namespace vmmgraph::torch
