// MemPool route: the allocator of a MemPool's segments, and the destruction of MemPools.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include <c10/core/Device.h>
#include <vmmgraph/torch.hpp>

#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch {

// Source of segments. The functions own their state, so a late raw_delete() works.
struct SegmentSource {
    // Returns null when out of memory; throws Error otherwise.
    std::function<void*(std::size_t bytes, void* stream)> allocate;
    // Returns VMMGRAPH_ERROR_FOREIGN_POINTER for foreign segments. Never throws.
    std::function<vmmgraph_status_t(void* segment)> release;
};

std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(SegmentSource source);
std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(std::shared_ptr<Memory> memory);

// A pool and its allocator, which outlives the pool.
struct SegmentPool {
    std::shared_ptr<compat::CUDAAllocator> allocator;
    std::unique_ptr<compat::MemPool> pool;
};

// Destroys a pool as soon as possible, and retries waiting ones. Torch's destructor asserts that no
// thread allocates to a pool of the device (2.6 to 2.12). If pools do not own their allocators,
// their tensors must be gone too.
void bury(SegmentPool pool = {});

// A running capture: bury() destroys no pool of its device. Waits for pools being destroyed, and
// marks replays of any arena that ran last on the stream, so other threads can order after them.
class CaptureUnderWay {
public:
    CaptureUnderWay(c10::DeviceIndex device, cudaStream_t stream);
    CaptureUnderWay(const CaptureUnderWay&) = delete;
    CaptureUnderWay& operator=(const CaptureUnderWay&) = delete;
    ~CaptureUnderWay();

    static bool by_this_thread() noexcept;

private:
    c10::DeviceIndex device_;
    std::shared_ptr<std::atomic<int>> begun_;
};

}  // namespace vmmgraph::torch
