// Allocator over torch_npu's own, which places the tensors of captures in spaces.

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <vmmgraph/torch_npu.hpp>

#include "../torch/undo.hpp"
#include "blocks.hpp"

namespace vmmgraph::torch_npu {
namespace {

namespace caching = c10_npu::NPUCachingAllocator;
using caching::NPUAllocator;
using Device = c10::DeviceIndex;
using Pool = c10::MempoolId_t;
using Data = c10::DataPtr;
using Stream = c10_npu::NPUStream;

// The allocator under this library's; set by the first install and never cleared, since deleters
// may run later.
std::atomic<NPUAllocator*> native_allocator{nullptr};

// Deleter of every block and of every pointer from this allocator's raw_alloc().
void delete_any(void* pointer) {
    if (pointer != nullptr && !release_block(pointer)) {
        native_allocator.load()->raw_delete(pointer);
    }
}

// Destination of a storage made on this thread. Does not drain the stream's queue: the handle is
// only compared.
struct Here {
    Device device = c10_npu::current_device();
    void* stream = c10_npu::getCurrentNPUStream(device).stream(false);
    std::shared_ptr<Memory> memory = memory_of(device, stream);

    // Returns null if the storage belongs to torch_npu.
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        return memory && bytes > 0 ? allocate_block(memory, device, bytes, stream) : nullptr;
    }
};

// Overrides every virtual function of torch_npu 2.14's allocator and forwards everything except
// storages of captures. tests/torch_npu/links.sh checks the vtable for missing functions.
class BlockAllocator final : public NPUAllocator {
public:
    explicit BlockAllocator(NPUAllocator* native) : native_(native) {}

    Data allocate(std::size_t bytes) override {
        if (captures_under_way() > 0) {
            const Here here;
            if (void* const block = here.allocate(bytes)) {
                return {block, block, &delete_any,
                        c10::Device(c10::DeviceType::PrivateUse1, here.device)};
            }
        }
        return native_->allocate(bytes);
    }
    Data allocate_with_aligned(std::size_t bytes, std::size_t aligned) const override {
        TORCH_CHECK(captures_under_way() == 0 || !Here().memory,
                    "vmmgraph: cannot allocate with a chosen alignment: the stream is under "
                    "capture; allocate before the capture");
        return native_->allocate_with_aligned(bytes, aligned);
    }
    void* raw_alloc(std::size_t bytes) override {
        if (captures_under_way() > 0) {
            if (void* const block = Here().allocate(bytes)) {
                return block;
            }
        }
        return native_->raw_alloc(bytes);
    }
    void* raw_alloc_with_stream(std::size_t bytes, aclrtStream stream) override {
        if (captures_under_way() > 0) {
            const auto device = c10_npu::current_device();
            if (void* const block =
                    Here{device, stream, memory_of(device, stream)}.allocate(bytes)) {
                return block;
            }
        }
        return native_->raw_alloc_with_stream(bytes, stream);
    }
    void raw_delete(void* pointer) override { delete_any(pointer); }
    // Torch recognises its own tensors by this deleter.
    c10::DeleterFnPtr raw_deleter() const override {
        return captures_under_way() > 0 && Here().memory ? &delete_any : native_->raw_deleter();
    }
    bool is_simple_data_ptr(const Data& data) const override {
        return native_->is_simple_data_ptr(data);
    }
    void copy_data(void* to, const void* from, std::size_t bytes) const override {
        native_->copy_data(to, from, bytes);
    }

    using NPUAllocator::recordStream;
    void recordStream(const Data& data, Stream stream) override {
        if (const auto memory = owner_of(data.get())) {
            memory->space.record_stream(data.get(), stream.stream());
        } else {
            native_->recordStream(data, stream);
        }
    }
    void recordStream(const Data& data, c10::Stream stream) override {
        recordStream(data, Stream(stream));
    }
    void eraseStream(const Data& data, Stream stream) override {
        if (!owner_of(data.get())) {
            native_->eraseStream(data, stream);
        }
    }
    // Null for a block: HCCL records no work, and the streams of record_stream() protect the block.
    void* getBlockPtr(const Data& data) override {
        return owner_of(data.get()) ? nullptr : native_->getBlockPtr(data);
    }
    void eraseStreamWithBlockPtr(void* block, Stream stream, void* work) override {
        if (block != nullptr) {
            native_->eraseStreamWithBlockPtr(block, stream, work);
        }
    }
    void recordHcclWorkForBlock(void* block, void* work) override {
        if (block != nullptr) {
            native_->recordHcclWorkForBlock(block, work);
        }
    }
    void* getBaseAllocation(void* pointer, std::size_t* size) override {
        return owner_of(pointer, size) ? pointer : native_->getBaseAllocation(pointer, size);
    }
    caching::ShareableHandle shareIpcHandle(void* pointer) override {
        TORCH_CHECK(!owner_of(pointer), "vmmgraph: cannot share the memory at ", pointer,
                    " with another process: it belongs to a captured graph; send a copy that is "
                    "made outside captures");
        return native_->shareIpcHandle(pointer);
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        return native_->getIpcDevPtr(std::move(handle));
    }
    bool checkBlockIsSafe(const Data& data) override {
        return owner_of(data.get()) || native_->checkBlockIsSafe(data);
    }
    void updateBlockToSafe(const Data& data) override {
        if (!owner_of(data.get())) {
            native_->updateBlockToSafe(data);
        }
    }

    // The native allocator gets a pool with the same id, so it knows of the capture.
    void beginAllocateToPool(Device device, Pool pool,
                             std::function<bool(aclrtStream)> filter) override {
        native_->beginAllocateToPool(device, pool, filter);
        if (auto memory = announced()) {
            begin_capture({device, pool}, std::move(filter), std::move(memory));
        }
    }
    void endAllocateToPool(Device device, Pool pool) override {
        static_cast<void>(end_capture({device, pool}));
        native_->endAllocateToPool(device, pool);
    }
    void releasePool(Device device, Pool pool) override { native_->releasePool(device, pool); }
    int getPoolUseCount(Device device, Pool pool) override {
        return native_->getPoolUseCount(device, pool);
    }
    void setUseOnOOM(Device device, Pool pool, bool use) override {
        native_->setUseOnOOM(device, pool, use);
    }
    void setNoSplit(Device device, Pool pool) override { native_->setNoSplit(device, pool); }
    bool hasCapturesUnderway(Device device) override {
        return native_->hasCapturesUnderway(device);
    }
    void markCaptureBegin(Device device) override { native_->markCaptureBegin(device); }
    void markCaptureEnd(Device device) override { native_->markCaptureEnd(device); }
    bool checkPoolLiveAllocations(Device device, Pool pool,
                                  const std::unordered_set<void*>& expected) override {
        return native_->checkPoolLiveAllocations(device, pool, expected);
    }
    std::shared_ptr<caching::AllocatorState> getCheckpointState(Device device, Pool pool) override {
        return native_->getCheckpointState(device, pool);
    }
    caching::CheckpointDelta setCheckpointPoolState(
        Device device, std::shared_ptr<caching::AllocatorState> state) override {
        return native_->setCheckpointPoolState(device, std::move(state));
    }
    void createOrIncrefPool(Device device, Pool pool,
                            std::shared_ptr<NPUAllocator> allocator) override {
        native_->createOrIncrefPool(device, pool, std::move(allocator));
    }

    bool initialized() override { return native_->initialized(); }
    void init(int devices) override { native_->init(devices); }
    std::string name() override { return native_->name(); }
    double getMemoryFraction(int device) override { return native_->getMemoryFraction(device); }
    void setMemoryFraction(double fraction, int device) override {
        native_->setMemoryFraction(fraction, device);
    }
    void emptyCache(Pool pool) override { native_->emptyCache(pool); }
    void emptyCache(bool check) override { native_->emptyCache(check); }
    void emptyCacheImpl(bool check, bool physical) override {
        native_->emptyCacheImpl(check, physical);
    }
    void emptyVirtAddrCache(bool check) override { native_->emptyVirtAddrCache(check); }
    void cacheInfo(int device, std::size_t* cached, std::size_t* largest) override {
        native_->cacheInfo(device, cached, largest);
    }
    std::pair<std::size_t, std::size_t> getMemoryInfo(Device device) override {
        return native_->getMemoryInfo(device);
    }
    void FreeDeviceCachedMemory(int device) override { native_->FreeDeviceCachedMemory(device); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
        return native_->getDeviceStats(device);
    }
    void resetAccumulatedStats(Device device) override { native_->resetAccumulatedStats(device); }
    void resetPeakStats(Device device) override { native_->resetPeakStats(device); }
    caching::SnapshotInfo snapshot(Pool pool) override { return native_->snapshot(pool); }
    bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
    void recordHistory(bool enabled, caching::CreateContextFn context, std::size_t entries,
                       caching::RecordContext when) override {
        native_->recordHistory(enabled, context, entries, when);
    }
    void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
        native_->attachOutOfMemoryObserver(std::move(observer));
    }
    void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
        native_->attachOomRejectionObserver(std::move(observer));
    }
    void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
        native_->attachAllocatorTraceTracker(std::move(tracker));
    }
    bool checkUceInMemPool(int device) override { return native_->checkUceInMemPool(device); }
    void markAllBlockUnsafe(int device) override { native_->markAllBlockUnsafe(device); }
    void cleanEvent() override { native_->cleanEvent(); }
    void buildServerMemMapForHccl(int device, std::shared_ptr<c10d_npu::HCCLComm> comm) override {
        native_->buildServerMemMapForHccl(device, std::move(comm));
    }

private:
    NPUAllocator* const native_;
};

// Never destroyed, because torch_npu may call it at exit.
NPUAllocator* forwarding(NPUAllocator* native) {
    static std::mutex mutex;
    static auto* const made = new std::unordered_map<NPUAllocator*, BlockAllocator*>;
    const std::lock_guard lock(mutex);
    auto& ours = (*made)[native];
    if (ours == nullptr) {
        ours = new BlockAllocator(native);
    }
    return ours;
}

std::atomic<NPUAllocator*> installed_allocator{nullptr};

}  // namespace

bool installed() noexcept {
    auto* const ours = installed_allocator.load();
    return ours != nullptr && caching::allocator.load() == ours;
}

void install() {
    if (installed()) {
        return;
    }
    auto* const native = caching::allocator.load();
    if (native == nullptr) {
        torch::refuse(
            VMMGRAPH_ERROR_WRONG_STATE,
            "cannot install the allocator: torch_npu has none yet; initialise torch_npu first");
    }
    native_allocator.store(native);
    auto* const ours = forwarding(native);
    installed_allocator.store(ours);
    caching::allocator.store(ours);
}

void uninstall() {
    if (captures_under_way() > 0) {
        torch::refuse(VMMGRAPH_ERROR_WRONG_STATE,
                      "cannot uninstall the allocator: " + std::to_string(captures_under_way()) +
                          " captures are running; end the captures first");
    }
    auto* ours = installed_allocator.load();
    if (ours == nullptr) {
        return;
    }
    if (!caching::allocator.compare_exchange_strong(ours, native_allocator.load())) {
        torch::refuse(VMMGRAPH_ERROR_WRONG_STATE,
                      "cannot uninstall the allocator: another allocator was installed over this "
                      "one; remove that allocator first");
    }
    installed_allocator.store(nullptr);
}

}  // namespace vmmgraph::torch_npu
