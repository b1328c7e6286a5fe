// Whom the blocks under torch's storages belong to.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

// The memory of a capture, or a region. Each block keeps it. Any thread, any time.
class BlockOwner {
public:
    BlockOwner() = default;
    BlockOwner(const BlockOwner&) = delete;
    BlockOwner& operator=(const BlockOwner&) = delete;
    virtual ~BlockOwner() = default;

    // Frees a block, which the default stream and torch's current one on the device (none: -1) may still read. Never throws: torch frees
    // in destructors. What is refused is logged.
    virtual vmmgraph_status_t release(void* block, c10::DeviceIndex device) noexcept = 0;

    // Notes that a stream uses a block. Throws Error.
    virtual void record_stream(void* block, void* stream) = 0;

    // Whether torch is to make its own error of a refusal: out of memory, addresses, budget or descriptors, or more bytes than there can be.
    static bool is_out_of_memory(vmmgraph_status_t status) noexcept {
        return (status >= VMMGRAPH_ERROR_OUT_OF_MEMORY && status <= VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS) ||
               status == VMMGRAPH_ERROR_INVALID_SIZE;
    }

protected:
    // Programs drop tensors right after work on this stream that reads them, as torch's own memory stays mapped.
    static cudaStream_t current_stream(c10::DeviceIndex device) noexcept {
        try {
            return device < 0 ? nullptr : c10::cuda::getCurrentCUDAStream(device).stream();
        } catch (...) {
            // Torch is going down, with all its streams.
            return nullptr;
        }
    }
};

}  // namespace vmmgraph::torch
