// Eager memory of an arena as a block owner. Wraps the Rust object, which keeps the blocks alive
// but not the arena.
#pragma once

#include <cstddef>

#include "block_owner.hpp"
#include "rust/cxx.h"
#include "vmmgraph-bridge/src/eager.rs.h"
#include <vmmgraph/arena.hpp>

namespace vmmgraph::torch {

class EagerMemory final : public BlockOwner {
public:
    // Throws Error for a moved-from arena.
    explicit EagerMemory(const SharedVmmAllocator& arena) try
        : memory_(bridge::eager_memory(reinterpret_cast<std::size_t>(arena.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // Allocates a block of the stream's active scope. Returns null when out of memory; throws Error
    // otherwise.
    void* allocate(std::size_t bytes, void* stream, bool kept) {
        std::size_t block = 0;
        const auto status = bridge::allocate_eager(
            *memory_, bytes, reinterpret_cast<std::size_t>(stream), kept, block);
        if (is_out_of_memory(status)) {
            return nullptr;
        }
        detail::check(status);
        return reinterpret_cast<void*>(block);
    }

    vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept override {
        return bridge::release_eager(*memory_, reinterpret_cast<std::size_t>(block),
                                     reinterpret_cast<std::size_t>(current_stream(device)));
    }

    void record_stream(void* block, void* stream) override {
        detail::check(bridge::record_stream_eager(*memory_, reinterpret_cast<std::size_t>(block),
                                                  reinterpret_cast<std::size_t>(stream)));
    }

private:
    rust::Box<bridge::EagerMemory> memory_;
};

}  // namespace vmmgraph::torch
