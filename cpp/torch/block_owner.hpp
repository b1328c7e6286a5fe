// Owners of the blocks under torch's storages.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

// Memory of a capture, a region, or an arena's eager scopes. Each block keeps its owner alive.
// Thread-safe.
class BlockOwner {
public:
    BlockOwner() = default;
    BlockOwner(const BlockOwner&) = delete;
    BlockOwner& operator=(const BlockOwner&) = delete;
    virtual ~BlockOwner() = default;

    // Frees a block, which the default stream and torch's current stream on the device (-1: none)
    // may still read. Never throws, since torch frees in destructors; logs refusals.
    virtual vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept = 0;

    virtual void record_stream(void* block, void* stream) = 0;

    // True if torch reports the refusal as its own out-of-memory error: no memory, addresses,
    // budget or descriptors, or an impossible size.
    static bool is_out_of_memory(vmmgraph_status_t status) noexcept {
        return (status >= VMMGRAPH_ERROR_OUT_OF_MEMORY &&
                status <= VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS) ||
               status == VMMGRAPH_ERROR_INVALID_SIZE;
    }

protected:
    // Programs drop tensors while work on this stream still reads their bytes.
    static cudaStream_t current_stream(c10::DeviceIndex device) noexcept {
        try {
            return device < 0 ? nullptr : c10::cuda::getCurrentCUDAStream(device).stream();
        } catch (...) {
            // Torch is shutting down.
            return nullptr;
        }
    }
};

}  // namespace vmmgraph::torch
