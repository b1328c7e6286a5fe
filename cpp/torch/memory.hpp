// Memory of one capture, for both allocators. Wraps the Rust object, which keeps the blocks alive
// but not the space.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "block_owner.hpp"
#include "parked.hpp"
#include "rust/cxx.h"
#include "vmmgraph-bridge/src/blocks.rs.h"
#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

class Memory final : public BlockOwner {
public:
    explicit Memory(const Space& space) try
        : allocator_(bridge::torch_allocator(reinterpret_cast<std::size_t>(space.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // Allocates a block. Returns null when out of memory or for an impossible size; throws Error
    // otherwise.
    void* allocate(std::size_t bytes, void* stream, bridge::BlockKind kind) {
        free_parked(parked_.joined(static_cast<cudaStream_t>(stream)));
        std::size_t block = 0;
        const auto status = bridge::allocate(*allocator_, bytes,
                                             reinterpret_cast<std::size_t>(stream), kind, block);
        if (is_out_of_memory(status)) {
            return nullptr;
        }
        detail::check(status);
        if (kind == bridge::BlockKind::Remote) {
            has_remote_.store(true);
        }
        return reinterpret_cast<void*>(block);
    }

    [[nodiscard]] bool has_remote() const noexcept { return has_remote_.load(); }
    // True if other processes can import the pages: NCCL and similar libraries export pages of a
    // capture on their own.
    [[nodiscard]] bool is_shareable() const { return bridge::is_shareable(*allocator_); }

    vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept override {
        const auto status = bridge::release(*allocator_, reinterpret_cast<std::size_t>(block),
                                            reinterpret_cast<std::size_t>(current_stream(device)));
        try {
            parked_.freed(block);
        } catch (const std::exception&) {
            // Out of host memory: the block stays busy until the seal.
        }
        return status;
    }

    // Call after a capture: the next piece can reuse blocks that several streams used.
    void capture_ended() { free_parked(parked_.end()); }

    // True if the address lies in the space, inside a live block or not.
    [[nodiscard]] bool contains(const void* address) const {
        return bridge::contains(*allocator_, reinterpret_cast<std::size_t>(address));
    }

    // `only` is true (from the beginning on) while captured graphs are launched only by replays of
    // the space. A tensor freed before the first launch then costs no pages.
    void launch_by_replay_only(bool only) {
        detail::check(bridge::launch_by_replay_only(*allocator_, only));
    }
    // Allocates short blocks as kept blocks if the same blocks outlived earlier captures of the
    // arena.
    void predict_retained() { detail::check(bridge::predict_retained(*allocator_)); }
    // Records a captured stream that is never destroyed. The program may use tensors on it without
    // record_stream().
    void captured_on(void* stream) {
        detail::check(bridge::captured_on(*allocator_, reinterpret_cast<std::size_t>(stream)));
    }

    // Call before a seal that must preserve contents: no block is freed until the returned object
    // is destroyed. Throws Error.
    [[nodiscard]] rust::Box<bridge::PreservedBlocks> preserve(Retain retain) const {
        auto preserved = bridge::no_preserved_blocks();
        detail::check(
            bridge::begin_preserving(*preserved, *allocator_, static_cast<std::int32_t>(retain)));
        return preserved;
    }

    // Reserves addresses for transient kernel memory.
    vmmgraph_status_t make_workspace(bridge::Workspace& workspace,
                                     std::size_t bytes) const noexcept {
        return bridge::make_workspace(workspace, *allocator_, bytes);
    }
    // Call before a replay that uses the workspace on `stream`, or on any stream (`anywhere`). No
    // other work of the arena may use it. Sets `anywhere` if later replays may use any stream.
    vmmgraph_status_t use_workspace(const bridge::Workspace& workspace, void* stream,
                                    bool& anywhere) const noexcept {
        return bridge::use_workspace(workspace, *allocator_, reinterpret_cast<std::size_t>(stream),
                                     anywhere);
    }
    void leave_workspace(const bridge::Workspace& workspace) const noexcept {
        static_cast<void>(bridge::leave_workspace(workspace, *allocator_));
    }

    void record_stream(void* block, void* stream) override {
        std::size_t own = 0;
        detail::check(bridge::record_stream(*allocator_, reinterpret_cast<std::size_t>(block),
                                            reinterpret_cast<std::size_t>(stream), own));
        if (own != 0) {
            parked_.note(block, reinterpret_cast<cudaStream_t>(own),
                         static_cast<cudaStream_t>(stream));
        }
    }

private:
    // Blocks refused here are freed by the seal.
    void free_parked(const std::vector<void*>& blocks) const {
        for (void* const block : blocks) {
            static_cast<void>(
                bridge::free_parked(*allocator_, reinterpret_cast<std::size_t>(block)));
        }
    }

    rust::Box<bridge::VmmTorchAllocator> allocator_;
    ParkedBlocks parked_;
    std::atomic<bool> has_remote_{false};
};

}  // namespace vmmgraph::torch
