// One capture's memory, as the two allocators see it: a thin owner of the Rust side, which keeps the blocks and not the space.
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
#include "vmmgraph/src/bridge/blocks.rs.h"
#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

class Memory final : public BlockOwner {
public:
    explicit Memory(const Space& space) try : allocator_(bridge::torch_allocator(reinterpret_cast<std::size_t>(space.handle()))) {
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        auto info = detail::sized<ErrorInfo>();
        info.status = VMMGRAPH_ERROR_INVALID_HANDLE;
        throw Error(error.what(), info);
    }

    // A block. Null when the arena is out of memory, addresses, budget or descriptors, and for more bytes than there can be;
    // throws Error for everything else.
    void* allocate(std::size_t bytes, void* stream, bridge::BlockKind kind) {
        free_parked(parked_.joined(static_cast<cudaStream_t>(stream)));
        std::size_t block = 0;
        const auto status = bridge::allocate(*allocator_, bytes, reinterpret_cast<std::size_t>(stream), kind, block);
        if (is_out_of_memory(status)) {
            return nullptr;
        }
        detail::check(status);
        if (kind == bridge::BlockKind::Remote) {
            has_remote_.store(true);
        }
        return reinterpret_cast<void*>(block);
    }

    // Whether a remote block was ever made in it.
    [[nodiscard]] bool has_remote() const noexcept { return has_remote_.load(); }
    // Whether other processes can be given its pages, as libraries do by themselves with what they meet in a capture.
    [[nodiscard]] bool is_shareable() const { return bridge::is_shareable(*allocator_); }

    // What the streams may still read matters if the capture is over.
    vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept override {
        const auto status =
            bridge::release(*allocator_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(current_stream(device)));
        try {
            parked_.freed(block);
        } catch (const std::exception&) {
            // Out of host memory: the block is busy until the seal.
        }
        return status;
    }

    // A capture of it has ended, or was abandoned: blocks that other streams used in it can be used again by the next piece.
    void capture_ended() { free_parked(parked_.end()); }

    // Whether the address lies in the space, in a live block or not.
    [[nodiscard]] bool contains(const void* address) const { return bridge::contains(*allocator_, reinterpret_cast<std::size_t>(address)); }

    // With `only`, and from the beginning on: what is captured is launched by replays of the space only, until this is called without. A tensor
    // that goes before the first one costs nothing then.
    void launch_by_replay_only(bool only) { detail::check(bridge::launch_by_replay_only(*allocator_, only)); }
    // Its short blocks are kept ones where those of the arena's earlier captures outlived them.
    void keep_as_before() { detail::check(bridge::keep_as_before(*allocator_)); }
    // A stream that lasts was captured, on which the program may use tensors without saying so.
    void captured_on(void* stream) { detail::check(bridge::captured_on(*allocator_, reinterpret_cast<std::size_t>(stream))); }

    // Before a seal, around which the caller carries over what was written since the capture: until the end of what this returns every block
    // stays where it is, whoever frees it. Throws Error.
    [[nodiscard]] rust::Box<bridge::Carry> carry(Retain retain) const {
        auto carry = bridge::no_carry();
        detail::check(bridge::begin_carry(*carry, *allocator_, static_cast<std::int32_t>(retain)));
        return carry;
    }

    // Addresses for what kernels use in passing, on the arena's device; the status.
    vmmgraph_status_t make_workspace(bridge::Workspace& workspace, std::size_t bytes) const noexcept {
        return bridge::make_workspace(workspace, *allocator_, bytes);
    }
    // Before a replay on a stream that lasts, or `anywhere`, that uses it, where nothing else of the arena does; the status. Says whether that may be
    // anywhere from now on.
    vmmgraph_status_t use_workspace(const bridge::Workspace& workspace, void* stream, bool& anywhere) const noexcept {
        return bridge::use_workspace(workspace, *allocator_, reinterpret_cast<std::size_t>(stream), anywhere);
    }
    // Nobody else gets its page before the arena's replays so far are over.
    void leave_workspace(const bridge::Workspace& workspace) const noexcept {
        static_cast<void>(bridge::leave_workspace(workspace, *allocator_));
    }

    void record_stream(void* block, void* stream) override {
        std::size_t own = 0;
        detail::check(bridge::record_stream(*allocator_, reinterpret_cast<std::size_t>(block), reinterpret_cast<std::size_t>(stream), own));
        if (own != 0) {
            parked_.note(block, reinterpret_cast<cudaStream_t>(own), static_cast<cudaStream_t>(stream));
        }
    }

private:
    // The seal frees what is refused here.
    void free_parked(const std::vector<void*>& blocks) const {
        for (void* const block : blocks) {
            static_cast<void>(bridge::free_parked(*allocator_, reinterpret_cast<std::size_t>(block)));
        }
    }

    rust::Box<bridge::VmmTorchAllocator> allocator_;
    ParkedBlocks parked_;
    std::atomic<bool> has_remote_{false};
};

}  // namespace vmmgraph::torch
