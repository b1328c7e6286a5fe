// The eager memory of an arena, as the allocator sees it: a thin owner of the Rust side, which keeps the blocks and not the arena.
#pragma once

#include <cstddef>

#include "block_owner.hpp"
#include "rust/cxx.h"
#include "vmmgraph/src/bridge/eager.rs.h"
#include <vmmgraph/arena.hpp>

namespace vmmgraph::torch {

class EagerMemory final : public BlockOwner {
public:
    // Throws Error for an arena that was moved from.
    explicit EagerMemory(const SharedVmmAllocator& arena) try
        : memory_(bridge::eager_memory(reinterpret_cast<std::size_t>(arena.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // A block of the scope under way on the stream. Null when there is no memory, budget, or address for it; throws Error for everything
    // else.
    void* allocate(std::size_t bytes, void* stream, bool kept) {
        std::size_t block = 0;
        const auto status = bridge::allocate_eager(*memory_, bytes, reinterpret_cast<std::size_t>(stream), kept, block);
        if (is_out_of_memory(status)) {
            return nullptr;
        }
        detail::check(status);
        return reinterpret_cast<void*>(block);
    }

    vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept override {
        return bridge::release_eager(*memory_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(current_stream(device)));
    }

    void record_stream(void* block, void* stream) override {
        detail::check(bridge::record_stream_eager(*memory_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(stream)));
    }

private:
    rust::Box<bridge::EagerMemory> memory_;
};

}  // namespace vmmgraph::torch
