// Forwards every virtual function of torch's allocators to a second allocator.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "compat.hpp"

// Torch 2.10 and later; declared without a definition.
namespace c10::cuda::CUDACachingAllocator {
struct StreamSegmentSize;
}

namespace vmmgraph::torch {

// `Base` is one of torch's concrete allocators, `Native` the type of the allocator to forward to.
//
// Each function is declared with every signature of any release and never marked `override`: in a
// template, a body is instantiated only if it overrides a base function. tests/torch/forwards.sh
// checks the vtable for missing functions. copy_data is final in the base.
template <class Base, class Native>
class Forwarding : public Base {
protected:
    using Device = c10::DeviceIndex;
    using Pool = compat::PoolId;
    using Text = std::string;

    template <class Allocate, class Free>
    Forwarding(Native* native, Allocate allocate, Free free)
        : Base(allocate, free), native_(native) {}

    Native* native() const { return native_; }

public:
    c10::DataPtr allocate(std::size_t bytes) { return native_->allocate(bytes); }
    c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) {
        return native_->allocateWithAddress(bytes, address);
    }
    bool is_simple_data_ptr(const c10::DataPtr& data) const {
        return native_->is_simple_data_ptr(data);
    }
    c10::DeleterFnPtr raw_deleter() const { return native_->raw_deleter(); }
    void* raw_alloc(std::size_t bytes) { return native_->raw_alloc(bytes); }
    void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
        return native_->raw_alloc_with_stream(bytes, stream);
    }
    void raw_delete(void* pointer) { native_->raw_delete(pointer); }
    void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
        native_->recordStream(data, stream);
    }
    // Torch 2.9 and later. The overload above decides.
    void recordStream(const c10::DataPtr& data, c10::Stream stream) {
        this->recordStream(data, c10::cuda::CUDAStream(stream));
    }
    void* getBaseAllocation(void* pointer, std::size_t* size) {
        return native_->getBaseAllocation(pointer, size);
    }

    void init(int devices) { native_->init(devices); }
    bool initialized() { return native_->initialized(); }
    double getMemoryFraction(Device device) { return native_->getMemoryFraction(device); }
    void setMemoryFraction(double fraction, Device device) {
        native_->setMemoryFraction(fraction, device);
    }
    auto getExpandableSegmentSizes(Device device)
        -> std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> {
        return native_->getExpandableSegmentSizes(device);
    }
    void emptyCache() { native_->emptyCache(); }
    void emptyCache(Pool pool) { native_->emptyCache(pool); }
    void enable(bool value) { native_->enable(value); }
    bool isEnabled() const { return native_->isEnabled(); }
    void cacheInfo(Device device, std::size_t* largest) { native_->cacheInfo(device, largest); }
    auto getMemoryInfo(Device device) -> std::pair<std::size_t, std::size_t> {
        return native_->getMemoryInfo(device);
    }
    auto getDeviceStats(Device device) -> c10::CachingDeviceAllocator::DeviceStats {
        return native_->getDeviceStats(device);
    }
    void resetAccumulatedStats(Device device) { native_->resetAccumulatedStats(device); }
    void resetPeakStats(Device device) { native_->resetPeakStats(device); }

    void beginAllocateToPool(Device device, Pool pool, std::function<bool(cudaStream_t)> filter) {
        native_->beginAllocateToPool(device, pool, std::move(filter));
    }
    void endAllocateToPool(Device device, Pool pool) { native_->endAllocateToPool(device, pool); }
    void releasePool(Device device, Pool pool) { native_->releasePool(device, pool); }
    void markCaptureBegin(Device device) { native_->markCaptureBegin(device); }
    void markCaptureEnd(Device device) { native_->markCaptureEnd(device); }
    int getPoolUseCount(Device device, Pool pool) { return native_->getPoolUseCount(device, pool); }
    void ensureExistsAndIncrefPool(Device device, Pool pool) {
        native_->ensureExistsAndIncrefPool(device, pool);
    }
    void createOrIncrefPool(Device device, Pool pool, Native* allocator) {
        native_->createOrIncrefPool(device, pool, allocator);
    }
    void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<Native> allocator) {
        native_->createOrIncrefPool(device, pool, std::move(allocator));
    }
    void setUseOnOOM(Device device, Pool pool) { native_->setUseOnOOM(device, pool); }
    void setUseOnOOM(Device device, Pool pool, bool use) {
        native_->setUseOnOOM(device, pool, use);
    }
    void setNoSplit(Device device, Pool pool) { native_->setNoSplit(device, pool); }
    bool checkPoolLiveAllocations(Device device, Pool pool,
                                  const std::unordered_set<void*>& expected) {
        return native_->checkPoolLiveAllocations(device, pool, expected);
    }
    auto getCheckpointState(Device device, Pool pool)
        -> std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> {
        return native_->getCheckpointState(device, pool);
    }
    auto setCheckpointPoolState(
        Device device, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state)
        -> c10::cuda::CUDACachingAllocator::CheckpointDelta {
        return native_->setCheckpointPoolState(device, std::move(state));
    }

    auto shareIpcHandle(void* pointer) -> c10::cuda::CUDACachingAllocator::ShareableHandle {
        return native_->shareIpcHandle(pointer);
    }
    std::shared_ptr<void> getIpcDevPtr(Text handle) {
        return native_->getIpcDevPtr(std::move(handle));
    }
    void enablePeerAccess(Device device, Device to) { native_->enablePeerAccess(device, to); }
    cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device,
                            std::size_t bytes, cudaStream_t stream, bool p2p) {
        return native_->memcpyAsync(to, to_device, from, from_device, bytes, stream, p2p);
    }

    using Snapshot = c10::cuda::CUDACachingAllocator::SnapshotInfo;
    Snapshot snapshot() { return native_->snapshot(); }
    Snapshot snapshot(Pool pool) { return native_->snapshot(pool); }
    Snapshot snapshot(Pool pool, bool traces) { return native_->snapshot(pool, traces); }
    bool isHistoryEnabled() { return native_->isHistoryEnabled(); }
    using CreateContext = c10::cuda::CUDACachingAllocator::CreateContextFn;
    using Record = c10::cuda::CUDACachingAllocator::RecordContext;
    void recordHistory(bool enabled, CreateContext context, std::size_t entries, Record when) {
        native_->recordHistory(enabled, context, entries, when);
    }
    void recordHistory(bool enabled, CreateContext context, std::size_t entries, Record when,
                       bool clear) {
        native_->recordHistory(enabled, context, entries, when, clear);
    }
    void recordHistory(bool enabled, CreateContext context, std::size_t entries, Record when,
                       bool clear, const std::vector<Text>& skip) {
        native_->recordHistory(enabled, context, entries, when, clear, skip);
    }
    auto getContextForPointer(const void* pointer) -> std::shared_ptr<c10::GatheredContext> {
        return native_->getContextForPointer(pointer);
    }
    void recordAnnotation(const std::vector<std::pair<Text, Text>>& annotation) {
        native_->recordAnnotation(annotation);
    }
    void annotateMemory(const void* pointer, const Text& metadata) {
        native_->annotateMemory(pointer, metadata);
    }
    void pushCompileContext(Text& context) { native_->pushCompileContext(context); }
    void popCompileContext() { native_->popCompileContext(); }
    bool supportsUserMetadata() { return native_->supportsUserMetadata(); }
    void setUserMetadata(const Text& metadata) { native_->setUserMetadata(metadata); }
    Text getUserMetadata() { return native_->getUserMetadata(); }
    void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) {
        native_->attachOutOfMemoryObserver(std::move(observer));
    }
    // The type has a name only from torch 2.12 on.
    void attachOomRejectionObserver(
        std::function<void(std::int64_t, std::size_t, std::size_t, std::size_t)> observer) {
        native_->attachOomRejectionObserver(std::move(observer));
    }
    void attachAllocatorTraceTracker(
        c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) {
        native_->attachAllocatorTraceTracker(std::move(tracker));
    }
    Text name() { return native_->name(); }

private:
    Native* const native_;
};

}  // namespace vmmgraph::torch
