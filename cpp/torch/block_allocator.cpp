#include "block_allocator.hpp"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <vmmgraph/torch.hpp>

#include "forwarding.hpp"
#include "guards.hpp"
#include "region_scope.hpp"
#include "registry.hpp"
#include "short_of_memory.hpp"
#include "vmmgraph-bridge/src/device.rs.h"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using compat::CUDAAllocator;
using Pluggable = ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

thread_local std::shared_ptr<Memory> announced;
// True after torch called markCaptureEnd() on this thread; the pool follows in endAllocateToPool()
// (torch 2.13 and later).
thread_local bool end_is_marked = false;

// Deleter of every block and of every pointer from this allocator's raw_alloc().
void delete_any(void* pointer) {
    if (pointer != nullptr && !registry::release_block(pointer)) {
        registry::native()->raw_delete(pointer);
    }
}

// Destination of a storage made on this thread: the capture that owns the stream, else a region or
// an eager scope, else torch.
struct Here {
    c10::DeviceIndex device = c10::cuda::current_device();
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
    std::shared_ptr<Memory> memory = registry::memory_of(device, stream);
    const ActiveScope* scope = memory ? nullptr : scope_for(device, stream);

    [[nodiscard]] bool ours() const { return memory || scope != nullptr; }
    // Null for torch's storages.
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        if (memory) {
            return registry::allocate_block(memory, device, bytes, stream);
        }
        return scope != nullptr ? allocate_in(*scope, bytes, stream) : nullptr;
    }
};

// Forwards to the native allocator, except for storages of a capture, a region or an eager scope.
//
// Derives from torch's concrete allocator and is a template, like `Forwarding`, because the set of
// virtual functions differs between releases.
#ifdef __clang__
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
template <class Native>
class BlockAllocator final : public Forwarding<Pluggable, Native> {
    using Forwards = Forwarding<Pluggable, Native>;
    using typename Forwards::Device;
    using typename Forwards::Pool;

public:
    explicit BlockAllocator(Native* native)
        : Forwards(
              native, [](std::size_t, int, cudaStream_t) -> void* { return nullptr; },
              [](void*, std::size_t, int, cudaStream_t) {}) {}

    c10::DataPtr allocate(std::size_t bytes) override {
        if (bytes > 0) {
            const Here here;
            if (void* const block = here.allocate(bytes)) {
                return {block, block, &delete_any, c10::Device(c10::DeviceType::CUDA, here.device)};
            }
        }
        return patiently(bytes, [&] { return Forwards::allocate(bytes); });
    }
    c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) {
        TORCH_CHECK(Here().memory == nullptr,
                    "vmmgraph: cannot allocate at a chosen address: a capture chooses its "
                    "addresses; allocate before the capture");
        return Forwards::allocateWithAddress(bytes, address);
    }
    // Torch recognises its own tensors by this deleter: the native one, unless raw_alloc() would
    // return a block.
    c10::DeleterFnPtr raw_deleter() const override {
        return Here().ours() ? &delete_any : Forwards::raw_deleter();
    }
    void* raw_alloc(std::size_t bytes) override {
        return raw_alloc_with_stream(
            bytes, c10::cuda::getCurrentCUDAStream(c10::cuda::current_device()).stream());
    }
    void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
        if (bytes > 0) {
            if (void* const block = Here{c10::cuda::current_device(), stream}.allocate(bytes)) {
                return block;
            }
        }
        return patiently(bytes, [&] { return Forwards::raw_alloc_with_stream(bytes, stream); });
    }
    void raw_delete(void* pointer) override { delete_any(pointer); }
    using Forwards::recordStream;
    void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
        if (const auto owner = registry::owner_of(data.get())) {
            return owner->record_stream(data.get(), stream.stream());
        }
        Forwards::recordStream(data, stream);
    }
    void* getBaseAllocation(void* pointer, std::size_t* size) override {
        return registry::owner_of(pointer, size) ? pointer
                                                 : Forwards::getBaseAllocation(pointer, size);
    }
    caching::ShareableHandle shareIpcHandle(void* pointer) override {
        constexpr const char* instead =
            "; send a copy that is made outside captures and regions, or inside disable()";
        TORCH_CHECK(!registry::owner_of(pointer), "vmmgraph: cannot share the memory at ", pointer,
                    " with another process: it belongs to a captured graph or a region", instead);
        try {
            return Forwards::shareIpcHandle(pointer);
        } catch (const c10::Error& error) {
            // CUDA's error for memory not from cudaMalloc.
            const std::string why = error.what_without_backtrace();
            TORCH_CHECK(why.find("invalid argument") == std::string::npos,
                        "vmmgraph: cannot share the memory at ", pointer,
                        " with another process: CUDA exports no handle for it, as for memory of a "
                        "region of the memory saver",
                        instead);
            throw;
        }
    }
    std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) {
        return registry::owner_of(pointer) ? nullptr : Forwards::getContextForPointer(pointer);
    }
    void annotateMemory(const void* pointer, const std::string& metadata) {
        if (!registry::owner_of(pointer)) {
            Forwards::annotateMemory(pointer, metadata);
        }
    }

    // Emptying all pools also returns the library's idle pages.
    void emptyCache() {
        Forwards::emptyCache();
        give_back_idle_pages();
    }
    void emptyCache(Pool pool) {
        Forwards::emptyCache(pool);
        if (pool == Pool(0, 0)) {
            give_back_idle_pages();
        }
    }

    // Also for the device's arenas. Torch calls this once per device pair.
    void enablePeerAccess(Device device, Device to) override {
        Forwards::enablePeerAccess(device, to);
        detail::check(bridge::admit(to, device));
    }

    // The native allocator gets a pool with the same id and filter, so it knows of the capture, and
    // a free queries no event of a capturing stream. Storages made before install() and resized in
    // the capture use this pool.
    //
    // A program may end its pool and begin the pool again within the capture (vLLM's symmetric
    // memory does): one capture, and one use of the pool.
    void beginAllocateToPool(Device device, Pool pool,
                             std::function<bool(cudaStream_t)> filter) override {
        const auto paused = announced ? nullptr : registry::paused_memory({device, pool});
        TORCH_CHECK(announced || paused || !ours(device, pool),
                    "vmmgraph: cannot begin the pool again: a capture uses the pool; end that "
                    "capture first");
        Forwards::beginAllocateToPool(device, pool, filter);
        if (announced) {
            registry::begin_capture({device, pool}, std::move(filter),
                                    std::exchange(announced, nullptr));
        } else if (paused) {
            registry::resume_capture({device, pool}, std::move(filter), paused);
            // Counted twice now, but torch releases the pool once.
            Forwards::releasePool(device, pool);
        } else {
            // A capture in torch's memory, or a MemPool scope, for which the note only costs pages.
            bridge::note_capture(device);
        }
    }
    void endAllocateToPool(Device device, Pool pool) override {
        // After a failed capture, torch's reset() ends the pool again.
        if (registry::end_capture({device, pool}, std::exchange(end_is_marked, false)) ||
            !ours(device, pool)) {
            Forwards::endAllocateToPool(device, pool);
        }
    }
    void markCaptureBegin(Device device) {
        Forwards::markCaptureBegin(device);
        registry::mark_begun(device);
    }
    void markCaptureEnd(Device device) {
        end_is_marked = true;
        Forwards::markCaptureEnd(device);
    }
    void releasePool(Device device, Pool pool) override {
        static_cast<void>(registry::drop_use({device, pool}));
        Forwards::releasePool(device, pool);
    }
    void ensureExistsAndIncrefPool(Device device, Pool pool) {
        Forwards::ensureExistsAndIncrefPool(device, pool);
        static_cast<void>(registry::add_use({device, pool}));
    }
    void createOrIncrefPool(Device device, Pool pool, Native* allocator) {
        require_none(allocator, device, pool);
        Forwards::createOrIncrefPool(device, pool, allocator);
        static_cast<void>(registry::add_use({device, pool}));
    }
    void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<Native> allocator) {
        require_none(allocator.get(), device, pool);
        Forwards::createOrIncrefPool(device, pool, std::move(allocator));
        static_cast<void>(registry::add_use({device, pool}));
    }
    void setUseOnOOM(Device device, Pool pool) {
        TORCH_CHECK(!ours(device, pool),
                    "vmmgraph: cannot lend the pool to other allocations: the pool belongs to a "
                    "capture; use another pool");
        Forwards::setUseOnOOM(device, pool);
    }
    void setUseOnOOM(Device device, Pool pool, bool use) {
        TORCH_CHECK(!use || !ours(device, pool),
                    "vmmgraph: cannot lend the pool to other allocations: the pool belongs to a "
                    "capture; use another pool");
        if (!ours(device, pool)) {
            Forwards::setUseOnOOM(device, pool, use);
        }
    }
    void setNoSplit(Device device, Pool pool) {
        // Blocks are never split.
        if (!ours(device, pool)) {
            Forwards::setNoSplit(device, pool);
        }
    }
    bool checkPoolLiveAllocations(Device device, Pool pool,
                                  const std::unordered_set<void*>& expected) override {
        const auto live = registry::live_blocks({device, pool});
        return live ? *live == expected
                    : Forwards::checkPoolLiveAllocations(device, pool, expected);
    }
    std::shared_ptr<caching::AllocatorState> getCheckpointState(Device device, Pool pool) override {
        TORCH_CHECK(!ours(device, pool),
                    "vmmgraph: cannot checkpoint the pool: the pool belongs to a capture; use "
                    "another pool");
        return Forwards::getCheckpointState(device, pool);
    }

private:
    // Retries torch's allocation once if make_room() freed memory.
    template <class Allocate>
    static auto patiently(std::size_t bytes, Allocate&& allocate) {
        try {
            return allocate();
        } catch (const c10::OutOfMemoryError&) {
            if (!make_room(c10::cuda::current_device(), bytes)) {
                throw;
            }
        }
        return allocate();
    }
    static bool ours(Device device, Pool pool) { return registry::uses_of({device, pool}) > 0; }
    static void require_none(const Native* allocator, Device device, Pool pool) {
        TORCH_CHECK(allocator == nullptr || !ours(device, pool),
                    "vmmgraph: cannot give the pool an allocator: the pool belongs to a capture; "
                    "use another pool");
    }
};

// Never destroyed, because torch may call it at exit.
CUDAAllocator* forwarding(CUDAAllocator* native) {
    static std::mutex mutex;
    static auto* const made =
        new std::unordered_map<CUDAAllocator*, BlockAllocator<CUDAAllocator>*>;
    const std::lock_guard lock(mutex);
    auto& ours = (*made)[native];
    if (ours == nullptr) {
        ours = new BlockAllocator<CUDAAllocator>(native);
    }
    return ours;
}

std::atomic<CUDAAllocator*> installed_allocator{nullptr};

}  // namespace

void announce(std::shared_ptr<Memory> memory) { announced = std::move(memory); }
bool withdraw() noexcept { return std::exchange(announced, nullptr) != nullptr; }

namespace {

// Without this, torch counts an unended capture forever and queries the current stream at each
// allocation and free.
template <class Native>
void end_mark(Native& native, c10::DeviceIndex device, compat::PoolId pool, const Memory* memory) {
    if constexpr (compat::marks_captures<Native>) {
        if (registry::take_mark({device, pool}, memory)) {
            native.markCaptureEnd(device);
        }
    }
}

}  // namespace

bool abandon(c10::DeviceIndex device, compat::PoolId pool) {
    end_mark(*registry::native(), device, pool, nullptr);
    if (registry::end_capture({device, pool})) {
        registry::native()->endAllocateToPool(device, pool);
    }
    bool released = false;
    while (registry::drop_use({device, pool})) {
        registry::native()->releasePool(device, pool);
        released = true;
    }
    return released;
}

bool abandon_one(c10::DeviceIndex device, compat::PoolId pool, const Memory* memory) {
    end_mark(*registry::native(), device, pool, memory);
    // The program ended the pool itself, and thereby the native allocator's.
    const bool paused = registry::paused_memory({device, pool}).get() == memory;
    if (registry::end_capture_into({device, pool}, memory)) {
        registry::native()->endAllocateToPool(device, pool);
    } else if (!paused) {
        return false;
    }
    registry::forget_capture(memory);
    if constexpr (compat::GraphOfOthers<at::cuda::CUDAGraph>::cleans_up()) {
        return false;
    }
    if (registry::drop_use({device, pool})) {
        registry::native()->releasePool(device, pool);
    }
    return true;
}

bool installed() noexcept {
    auto* const ours = installed_allocator.load();
    return ours != nullptr && caching::get() == ours;
}

void install() {
    require_release();
    if (installed()) {
        return;
    }
    require_native_allocator();
    auto* const native = caching::get();
    registry::set_native(native);
    auto* const ours = forwarding(native);
    installed_allocator.store(ours);
    caching::allocator.store(ours);
}

void uninstall() {
    if (registry::captures_under_way() > 0) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot uninstall the allocator: " + std::to_string(registry::captures_under_way()) +
                   " captures are running; end the captures first");
    }
    auto* ours = installed_allocator.load();
    if (ours == nullptr) {
        return;
    }
    if (!caching::allocator.compare_exchange_strong(ours, registry::native())) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot uninstall the allocator: another allocator was installed over this one; "
               "remove that allocator first");
    }
    installed_allocator.store(nullptr);
}

}  // namespace vmmgraph::torch
