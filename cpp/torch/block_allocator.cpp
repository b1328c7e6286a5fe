#include "block_allocator.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <vmmgraph/torch.hpp>

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using caching::CUDAAllocator;
using Pool = c10::MempoolId_t;

struct Block {
    std::shared_ptr<Memory> memory;
    std::size_t bytes;
};

struct Capture {
    c10::DeviceIndex device;
    Pool pool;
    std::function<bool(cudaStream_t)> filter;
    std::shared_ptr<Memory> memory;
};

// What outlives every install and uninstall: blocks that tensors still own, captures under way, pools that torch will release.
struct Registry {
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
    std::vector<Capture> captures;
    std::vector<std::pair<c10::DeviceIndex, Pool>> pools;
    // Read without the mutex, so that allocations outside captures cost one load.
    std::atomic<std::size_t> captures_under_way{0};
    std::atomic<std::size_t> blocks_alive{0};
    // The allocator under ours; set by the first install and never cleared, since deleters may come later.
    std::atomic<CUDAAllocator*> native{nullptr};
};

// Never destroyed: tensors in static storage are freed after any destructor of ours would have run.
Registry& registry() {
    static auto* const instance = new Registry;
    return *instance;
}

thread_local std::shared_ptr<Memory> announced;

// The memory of the capture the stream takes part in, by torch's own filter: helper threads and forked streams count too.
std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, cudaStream_t stream) {
    auto& all = registry();
    if (all.captures_under_way.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    const std::lock_guard lock(all.mutex);
    // The latest first, as torch does since 2.10.
    for (auto capture = all.captures.rbegin(); capture != all.captures.rend(); ++capture) {
        if (capture->device == device && capture->filter(stream)) {
            return capture->memory;
        }
    }
    return nullptr;
}

// A block for torch, or torch's own out-of-memory error.
void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
    void* const block = memory->allocate(bytes, stream);
    if (block == nullptr) {
        const auto message = detail::read_text([](char* buffer, std::size_t capacity, std::size_t* needed) {
            static_cast<void>(vmmgraph_last_error_message(buffer, capacity, needed));
        });
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes on device ",
                         static_cast<int>(device), " for a graph capture: ", message);
    }
    auto& all = registry();
    try {
        const std::lock_guard lock(all.mutex);
        all.blocks.insert_or_assign(block, Block{memory, bytes});
    } catch (...) {
        static_cast<void>(memory->release(block));
        throw;
    }
    all.blocks_alive.fetch_add(1, std::memory_order_release);
    return block;
}

// Frees a block if it is one of ours.
bool release_block(void* pointer) {
    auto& all = registry();
    if (all.blocks_alive.load(std::memory_order_acquire) == 0) {
        return false;
    }
    std::shared_ptr<Memory> memory;
    {
        const std::lock_guard lock(all.mutex);
        const auto found = all.blocks.find(pointer);
        if (found == all.blocks.end()) {
            return false;
        }
        memory = std::move(found->second.memory);
        all.blocks.erase(found);
    }
    all.blocks_alive.fetch_sub(1, std::memory_order_release);
    // Outside the lock: the last reference tears the space down.
    static_cast<void>(memory->release(pointer));
    return true;
}

// The deleter of everything that comes from our allocator by raw_alloc, and of every block.
void delete_any(void* pointer) {
    if (pointer != nullptr && !release_block(pointer)) {
        registry().native.load()->raw_delete(pointer);
    }
}

bool is_ours(c10::DeviceIndex device, Pool pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    return std::find(all.pools.begin(), all.pools.end(), std::pair(device, pool)) != all.pools.end();
}

bool end_capture(c10::DeviceIndex device, Pool pool) {
    auto& all = registry();
    Capture ended{};
    {
        const std::lock_guard lock(all.mutex);
        const auto found = std::find_if(all.captures.begin(), all.captures.end(),
                                        [&](const Capture& c) { return c.device == device && c.pool == pool; });
        if (found == all.captures.end()) {
            return false;
        }
        // Moved out, so that the filter (and what it captured) dies outside the lock.
        ended = std::move(*found);
        all.captures.erase(found);
    }
    all.captures_under_way.fetch_sub(1, std::memory_order_release);
    return true;
}

// Forwards to the native allocator, except for what belongs to a capture of ours.
//
// The base is torch's concrete allocator and not the abstract one, so that a virtual function that a later torch adds does not
// break the build. Every virtual function of torch 2.11 that can be overridden is forwarded (copy_data is final in the base).
class BlockAllocator final : public ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
public:
    explicit BlockAllocator(CUDAAllocator* native)
        : CUDAPluggableAllocator([](std::size_t, int, cudaStream_t) -> void* { return nullptr; },
                                 [](void*, std::size_t, int, cudaStream_t) {}),
          native_(native) {}

    c10::DataPtr allocate(std::size_t bytes) override {
        if (bytes > 0) {
            const auto device = c10::cuda::current_device();
            const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
            if (const auto memory = memory_of(device, stream)) {
                void* const block = allocate_block(memory, device, bytes, stream);
                return {block, block, &delete_any, c10::Device(c10::DeviceType::CUDA, device)};
            }
        }
        return native_->allocate(bytes);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &delete_any; }
    void* raw_alloc(std::size_t bytes) override {
        return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(c10::cuda::current_device()).stream());
    }
    void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
        if (bytes > 0) {
            const auto device = c10::cuda::current_device();
            if (const auto memory = memory_of(device, stream)) {
                return allocate_block(memory, device, bytes, stream);
            }
        }
        return native_->raw_alloc_with_stream(bytes, stream);
    }
    void raw_delete(void* pointer) override { delete_any(pointer); }
    void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
        auto& all = registry();
        if (data.get() != nullptr && all.blocks_alive.load(std::memory_order_acquire) > 0) {
            std::shared_ptr<Memory> memory;
            {
                const std::lock_guard lock(all.mutex);
                const auto found = all.blocks.find(data.get());
                memory = found == all.blocks.end() ? nullptr : found->second.memory;
            }
            if (memory) {
                return memory->record_stream(data.get(), stream.stream());
            }
        }
        native_->recordStream(data, stream);
    }
    void* getBaseAllocation(void* pointer, std::size_t* size) override {
        {
            auto& all = registry();
            const std::lock_guard lock(all.mutex);
            if (const auto found = all.blocks.find(pointer); found != all.blocks.end()) {
                if (size != nullptr) {
                    *size = found->second.bytes;
                }
                return pointer;
            }
        }
        return native_->getBaseAllocation(pointer, size);
    }

    void beginAllocateToPool(c10::DeviceIndex device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
        if (!announced) {
            return native_->beginAllocateToPool(device, pool, std::move(filter));
        }
        auto& all = registry();
        const std::lock_guard lock(all.mutex);
        all.pools.emplace_back(device, pool);
        all.captures.push_back({device, pool, std::move(filter), std::move(announced)});
        announced = nullptr;
        all.captures_under_way.fetch_add(1, std::memory_order_release);
    }
    void endAllocateToPool(c10::DeviceIndex device, Pool pool) override {
        if (!end_capture(device, pool)) {
            native_->endAllocateToPool(device, pool);
        }
    }
    void releasePool(c10::DeviceIndex device, Pool pool) override {
        auto& all = registry();
        {
            const std::lock_guard lock(all.mutex);
            const auto found = std::find(all.pools.begin(), all.pools.end(), std::pair(device, pool));
            if (found != all.pools.end()) {
                all.pools.erase(found);
                return;
            }
        }
        native_->releasePool(device, pool);
    }
    int getPoolUseCount(c10::DeviceIndex device, Pool pool) override {
        return is_ours(device, pool) ? 1 : native_->getPoolUseCount(device, pool);
    }

    // Everything else is the native allocator's.
    void init(int devices) override { native_->init(devices); }
    bool initialized() override { return native_->initialized(); }
    double getMemoryFraction(c10::DeviceIndex device) override { return native_->getMemoryFraction(device); }
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override { native_->setMemoryFraction(fraction, device); }
    std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
        return native_->getExpandableSegmentSizes(device);
    }
    void emptyCache(Pool pool = {0, 0}) override { native_->emptyCache(pool); }
    void enable(bool value) override { native_->enable(value); }
    bool isEnabled() const override { return native_->isEnabled(); }
    void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override { native_->cacheInfo(device, largest); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        return native_->getDeviceStats(device);
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override { native_->resetAccumulatedStats(device); }
    void resetPeakStats(c10::DeviceIndex device) override { native_->resetPeakStats(device); }
    caching::SnapshotInfo snapshot(Pool pool = {0, 0}, bool traces = true) override { return native_->snapshot(pool, traces); }
    void createOrIncrefPool(c10::DeviceIndex device, Pool pool, std::shared_ptr<CUDAAllocator> allocator) override {
        native_->createOrIncrefPool(device, pool, std::move(allocator));
    }
    void setUseOnOOM(c10::DeviceIndex device, Pool pool, bool use) override { native_->setUseOnOOM(device, pool, use); }
    void setNoSplit(c10::DeviceIndex device, Pool pool) override { native_->setNoSplit(device, pool); }
    bool checkPoolLiveAllocations(c10::DeviceIndex device, Pool pool, const std::unordered_set<void*>& expected) override {
        return native_->checkPoolLiveAllocations(device, pool, expected);
    }
    caching::ShareableHandle shareIpcHandle(void* pointer) override { return native_->shareIpcHandle(pointer); }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return native_->getIpcDevPtr(std::move(handle)); }
    bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
    void recordHistory(bool enabled, caching::CreateContextFn context, std::size_t entries, caching::RecordContext when, bool clear,
                       const std::vector<std::string>& skip) override {
        native_->recordHistory(enabled, context, entries, when, clear, skip);
    }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& md) override { native_->recordAnnotation(md); }
    void pushCompileContext(std::string& md) override { native_->pushCompileContext(md); }
    void popCompileContext() override { native_->popCompileContext(); }
    void setUserMetadata(const std::string& metadata) override { native_->setUserMetadata(metadata); }
    std::string getUserMetadata() override { return native_->getUserMetadata(); }
    void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
        native_->attachOutOfMemoryObserver(std::move(observer));
    }
    void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
        native_->attachAllocatorTraceTracker(std::move(tracker));
    }
    void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex to) override { native_->enablePeerAccess(device, to); }
    cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes, cudaStream_t stream,
                            bool p2p) override {
        return native_->memcpyAsync(to, to_device, from, from_device, bytes, stream, p2p);
    }
    std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device, Pool pool) override {
        return native_->getCheckpointState(device, pool);
    }
    caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                    std::shared_ptr<caching::AllocatorState> state) override {
        return native_->setCheckpointPoolState(device, std::move(state));
    }
    std::string name() override { return native_->name(); }
    std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override { return native_->getMemoryInfo(device); }

private:
    CUDAAllocator* const native_;
};

// Made once for the native allocator it stands over, and never destroyed, since torch may call it at exit.
CUDAAllocator* forwarding(CUDAAllocator* native) {
    static std::mutex mutex;
    static std::unordered_map<CUDAAllocator*, BlockAllocator*>* const made = new std::unordered_map<CUDAAllocator*, BlockAllocator*>;
    const std::lock_guard lock(mutex);
    auto& ours = (*made)[native];
    if (ours == nullptr) {
        ours = new BlockAllocator(native);
    }
    return ours;
}

std::atomic<CUDAAllocator*> installed_allocator{nullptr};

[[noreturn]] void refuse(const std::string& why) {
    auto info = detail::sized<ErrorInfo>();
    info.status = VMMGRAPH_ERROR_WRONG_STATE;
    info.device = -1;
    throw Error("vmmgraph: " + why, info);
}

}  // namespace

Announcement::Announcement(std::shared_ptr<Memory> memory) { announced = std::move(memory); }
Announcement::~Announcement() { announced = nullptr; }

void abandon(c10::DeviceIndex device, c10::MempoolId_t pool) {
    static_cast<void>(end_capture(device, pool));
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    std::erase(all.pools, std::pair(device, pool));
}

bool capturing() noexcept { return registry().captures_under_way.load(std::memory_order_acquire) > 0; }

bool installed() noexcept {
    auto* const ours = installed_allocator.load();
    return ours != nullptr && caching::get() == ours;
}

void install() {
    if (installed()) {
        return;
    }
    auto* const native = caching::get();
    if (native == nullptr || native->name() != "native") {
        refuse("torch's allocator is " + (native == nullptr ? "missing" : native->name()) +
               ", and graphs can only be captured over the native one (unset backend:cudaMallocAsync and custom allocators)");
    }
    if (!native->isEnabled()) {
        refuse("torch's caching is off (PYTORCH_NO_CUDA_MEMORY_CACHING), so its captures ask no allocator for memory");
    }
    registry().native.store(native);
    auto* const ours = forwarding(native);
    installed_allocator.store(ours);
    caching::allocator.store(ours);
}

void uninstall() {
    if (capturing()) {
        refuse("a capture is under way");
    }
    auto* ours = installed_allocator.load();
    if (ours == nullptr) {
        return;
    }
    if (!caching::allocator.compare_exchange_strong(ours, registry().native.load())) {
        refuse("another allocator was installed over ours");
    }
    installed_allocator.store(nullptr);
}

}  // namespace vmmgraph::torch
