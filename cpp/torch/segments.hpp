// The MemPool route's side of torch: an allocator that a MemPool asks for segments, and the end of such pools.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include <c10/core/Device.h>
#include <vmmgraph/torch.hpp>

#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch {

// Where segments come from. The functions own what they use, so that a late raw_delete is good whatever was destroyed before.
struct SegmentSource {
    // Null when out of memory; throws Error for everything else.
    std::function<void*(std::size_t bytes, void* stream)> allocate;
    // VMMGRAPH_ERROR_FOREIGN_POINTER for what is not its own. Never throws.
    std::function<vmmgraph_status_t(void* segment)> release;
};

std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(SegmentSource source);
std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(std::shared_ptr<Memory> memory);

// A pool and its allocator, which outlives it.
struct SegmentPool {
    std::shared_ptr<compat::CUDAAllocator> allocator;
    std::unique_ptr<compat::MemPool> pool;
};

// Destroys a pool as soon as torch can take it: not while a capture of its device is under way or anybody else allocates to a pool of it,
// since torch asserts in the destructor then (2.6 to 2.12), and where pools do not own their allocators, not before the last tensor in it is gone. Retries those that wait.
void bury(SegmentPool pool = {});

// A capture of a stream of a device: bury destroys no pool of that device while this lives. Waits for the pools that are being destroyed, and marks
// behind replays of any arena that were on the stream last, so that other threads may go on with those.
class CaptureUnderWay {
public:
    CaptureUnderWay(c10::DeviceIndex device, cudaStream_t stream);
    CaptureUnderWay(const CaptureUnderWay&) = delete;
    CaptureUnderWay& operator=(const CaptureUnderWay&) = delete;
    ~CaptureUnderWay();

    // Whether there is one that this thread began.
    static bool by_this_thread() noexcept;

private:
    c10::DeviceIndex device_;
    // How many its thread began; it may go on another one.
    std::shared_ptr<std::atomic<int>> begun_;
};

}  // namespace vmmgraph::torch
