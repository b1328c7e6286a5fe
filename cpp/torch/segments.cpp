#include "segments.hpp"

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "guards.hpp"
#include "vmmgraph-bridge/src/device.rs.h"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

class VMMTorchAllocator final
    : public ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
public:
    explicit VMMTorchAllocator(const std::shared_ptr<const SegmentSource>& source)
        : CUDAPluggableAllocator(
              [source](std::size_t bytes, int, cudaStream_t stream) {
                  return source->allocate(bytes, stream);
              },
              [source](void* segment, std::size_t, int, cudaStream_t) {
                  release(*source, segment);
              }),
          source_(source) {}

    void* raw_alloc(std::size_t bytes) override {
        return source_->allocate(
            bytes, c10::cuda::getCurrentCUDAStream(c10::cuda::current_device()).stream());
    }
    void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
        return source_->allocate(bytes, stream);
    }
    // The base class throws for foreign segments, and torch calls this in destructors.
    void raw_delete(void* segment) override { release(*source_, segment); }
    std::string name() override { return "vmmgraph"; }

private:
    static void release(const SegmentSource& source, void* segment) {
        if (segment == nullptr || source.release(segment) != VMMGRAPH_ERROR_FOREIGN_POINTER) {
            return;
        }
        // Up to torch 2.7 a thread without a MemPoolContext gets segments of the same pool from
        // cudaMalloc.
        if (cudaFree(segment) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
    }

    const std::shared_ptr<const SegmentSource> source_;
};

struct Graveyard {
    std::mutex mutex;
    std::vector<SegmentPool> pools;
    std::unordered_map<c10::DeviceIndex, std::size_t> captures;
    std::size_t destroying = 0;
    std::condition_variable destroyed;
};

Graveyard& graveyard() {
    // Never destroyed, like torch's own pools.
    static auto* const instance = new Graveyard;
    return *instance;
}

// True if torch would keep blocks and later free them through a dangling allocator pointer (or by
// cudaFree, up to 2.7).
bool must_wait(const SegmentPool& waiting) {
    if constexpr (compat::pool_owns_allocator) {
        return false;
    } else {
        try {
            const auto id = waiting.pool->id();
            for (const auto& segment : caching::snapshot().segments) {
                if (segment.owner_private_pool_id == id && segment.active_size > 0) {
                    return true;
                }
            }
            return false;
        } catch (...) {
            return true;
        }
    }
}

}  // namespace

std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(SegmentSource source) {
    return std::make_shared<VMMTorchAllocator>(
        std::make_shared<const SegmentSource>(std::move(source)));
}

std::shared_ptr<compat::CUDAAllocator> make_segment_allocator(std::shared_ptr<Memory> memory) {
    // Spaces of the host driver may exist where torch has no device.
    const c10::DeviceIndex device =
        c10::cuda::device_count() > 0 ? c10::cuda::current_device() : -1;
    return make_segment_allocator(
        {[memory](std::size_t bytes, void* stream) {
             return memory->allocate(bytes, stream, bridge::BlockKind::Local);
         },
         [memory, device](void* segment) { return memory->release(segment, device); }});
}

std::shared_ptr<compat::CUDAAllocator> make_allocator(const Space& space) {
    require_release();
    return make_segment_allocator(std::make_shared<Memory>(space));
}

std::shared_ptr<compat::CUDAAllocator> make_allocator(std::shared_ptr<SharedVmmAllocator> arena) {
    require_release();
    if (!arena) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT,
               "cannot make an allocator: the arena is null; pass an arena");
    }
    return make_segment_allocator(
        {[arena](std::size_t bytes, void* stream) -> void* {
             try {
                 return arena->allocate(bytes, stream);
             } catch (const OutOfMemory&) {
                 return nullptr;
             }
         },
         [arena](void* segment) { return vmmgraph_arena_deallocate(arena->handle(), segment); }});
}

void bury(SegmentPool pool) {
    auto& all = graveyard();
    std::vector<SegmentPool> ready;
    std::unique_lock lock(all.mutex);
    if (pool.pool) {
        all.pools.push_back(std::move(pool));
    }
    std::vector<SegmentPool> kept;
    for (auto& one : all.pools) {
        const bool waits = all.captures.count(one.pool->device()) > 0 ||
                           !compat::may_destroy_pools(one.pool->device()) || must_wait(one);
        (waits ? kept : ready).push_back(std::move(one));
    }
    all.pools = std::move(kept);
    if (ready.empty()) {
        return;
    }
    // Torch may hold its own lock while a program short of memory drops graphs.
    ++all.destroying;
    lock.unlock();
    ready.clear();
    lock.lock();
    --all.destroying;
    lock.unlock();
    all.destroyed.notify_all();
}

namespace {

thread_local std::shared_ptr<std::atomic<int>> begun_here;

}  // namespace

bool CaptureUnderWay::by_this_thread() noexcept {
    return begun_here && begun_here->load(std::memory_order_relaxed) > 0;
}

CaptureUnderWay::CaptureUnderWay(c10::DeviceIndex device, cudaStream_t stream) : device_(device) {
    if (!begun_here) {
        begun_here = std::make_shared<std::atomic<int>>(0);
    }
    begun_ = begun_here;
    bridge::mark_on(device, reinterpret_cast<std::size_t>(stream));
    auto& all = graveyard();
    std::unique_lock lock(all.mutex);
    all.destroyed.wait(lock, [&] { return all.destroying == 0; });
    ++all.captures[device];
    begun_->fetch_add(1, std::memory_order_relaxed);
}

CaptureUnderWay::~CaptureUnderWay() {
    begun_->fetch_sub(1, std::memory_order_relaxed);
    auto& all = graveyard();
    const std::lock_guard lock(all.mutex);
    if (const auto under_way = all.captures.find(device_); --under_way->second == 0) {
        all.captures.erase(under_way);
    }
}

}  // namespace vmmgraph::torch
