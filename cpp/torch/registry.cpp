#include "registry.hpp"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <vmmgraph/torch.hpp>

namespace vmmgraph::torch {
namespace {

thread_local std::size_t kept_scopes = 0;
// Value of `kept_scopes` at the innermost RemoteScope. The RemoteScope is the innermost scope while
// both are equal.
constexpr std::size_t no_scope = ~std::size_t{0};
thread_local std::size_t kept_around_remote = no_scope;

}  // namespace

KeptScope::KeptScope() noexcept { ++kept_scopes; }
KeptScope::~KeptScope() { --kept_scopes; }
bool KeptScope::active() noexcept { return kept_scopes > 0; }

RemoteScope::RemoteScope() noexcept : around_(std::exchange(kept_around_remote, kept_scopes)) {}
RemoteScope::~RemoteScope() { kept_around_remote = around_; }
bool RemoteScope::active() noexcept { return kept_around_remote == kept_scopes; }

}  // namespace vmmgraph::torch

namespace vmmgraph::torch::registry {
namespace {

struct Block {
    std::shared_ptr<BlockOwner> owner;
    std::size_t bytes;
    c10::DeviceIndex device;
};

struct Capture {
    PoolKey pool;
    std::function<bool(cudaStream_t)> filter;
    std::shared_ptr<Memory> memory;
    std::thread::id thread = std::this_thread::get_id();
    bool marked = false;
};

// A capture with an ended pool. The capture may continue, or its end was not reported yet.
struct Paused {
    PoolKey pool;
    std::shared_ptr<Memory> memory;
    bool marked;
};

// Only compared: the capture's graph, which uses the pool, also owns the memory.
struct PoolUse {
    PoolKey pool;
    const Memory* memory;
};

struct Registry {
    std::mutex mutex;
    std::unordered_map<const void*, Block> blocks;
    std::vector<Capture> captures;
    std::vector<Paused> paused;
    std::vector<PoolUse> uses;
    // Read without the mutex, so allocations outside captures cost one load.
    std::atomic<std::size_t> captures_under_way{0};
    std::atomic<std::size_t> blocks_alive{0};
    std::atomic<compat::CUDAAllocator*> native{nullptr};

    auto find_use(const PoolKey& pool) {
        return std::find_if(uses.begin(), uses.end(),
                            [&](const PoolUse& use) { return use.pool == pool; });
    }
};

// Never destroyed: tensors in static storage are freed after this library's destructors would have
// run.
Registry& registry() {
    static auto* const instance = new Registry;
    return *instance;
}

}  // namespace

compat::CUDAAllocator* native() { return registry().native.load(); }
void set_native(compat::CUDAAllocator* native) { registry().native.store(native); }

void begin_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter,
                   std::shared_ptr<Memory> memory) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    all.uses.push_back({pool, memory.get()});
    all.captures.push_back({pool, std::move(filter), std::move(memory)});
    all.captures_under_way.fetch_add(1, std::memory_order_release);
}

void resume_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter,
                    const std::shared_ptr<Memory>& memory) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    all.captures.push_back({pool, std::move(filter), memory});
    const auto before = [&](const Paused& one) { return one.pool == pool && one.memory == memory; };
    all.captures.back().marked =
        std::any_of(all.paused.begin(), all.paused.end(),
                    [&](const Paused& one) { return before(one) && one.marked; });
    std::erase_if(all.paused, before);
    all.captures_under_way.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<Memory> paused_memory(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = std::find_if(all.paused.rbegin(), all.paused.rend(),
                                    [&](const Paused& one) { return one.pool == pool; });
    return found == all.paused.rend() ? nullptr : found->memory;
}

void forget_capture(const Memory* memory) noexcept {
    auto& all = registry();
    std::vector<Paused> over;
    const std::lock_guard lock(all.mutex);
    const auto end =
        std::stable_partition(all.paused.begin(), all.paused.end(),
                              [&](const Paused& one) { return one.memory.get() != memory; });
    std::move(end, all.paused.end(), std::back_inserter(over));
    all.paused.erase(end, all.paused.end());
}

namespace {

template <class Which>
bool end_first(Which&& which, bool end_is_marked) {
    auto& all = registry();
    Capture ended{};
    {
        const std::lock_guard lock(all.mutex);
        const auto found = std::find_if(all.captures.begin(), all.captures.end(), which);
        if (found == all.captures.end()) {
            return false;
        }
        ended = std::move(*found);
        all.captures.erase(found);
        all.paused.push_back({ended.pool, ended.memory, ended.marked && !end_is_marked});
    }
    all.captures_under_way.fetch_sub(1, std::memory_order_release);
    return true;
}

}  // namespace

bool end_capture(const PoolKey& pool, bool end_is_marked) {
    return end_first([&](const Capture& capture) { return capture.pool == pool; }, end_is_marked);
}

bool end_capture_into(const PoolKey& pool, const Memory* memory) {
    return end_first(
        [&](const Capture& capture) {
            return capture.pool == pool && capture.memory.get() == memory;
        },
        false);
}

bool is_captured_into(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto of_pool = [&](const auto& one) { return one.pool == pool; };
    return std::any_of(all.captures.begin(), all.captures.end(), of_pool) ||
           std::any_of(all.paused.begin(), all.paused.end(), of_pool);
}

void mark_begun(c10::DeviceIndex device) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto here = std::this_thread::get_id();
    const auto begun = std::find_if(
        all.captures.rbegin(), all.captures.rend(),
        [&](const Capture& one) { return one.thread == here && one.pool.device == device; });
    if (begun != all.captures.rend()) {
        begun->marked = true;
    }
}

bool take_mark(const PoolKey& pool, const Memory* memory) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    bool marked = false;
    const auto take = [&](auto& one) {
        if (one.pool == pool && (memory == nullptr || one.memory.get() == memory)) {
            marked = std::exchange(one.marked, false) || marked;
        }
    };
    std::for_each(all.captures.begin(), all.captures.end(), take);
    std::for_each(all.paused.begin(), all.paused.end(), take);
    return marked;
}

std::size_t captures_under_way() {
    return registry().captures_under_way.load(std::memory_order_acquire);
}

std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, cudaStream_t stream) {
    if (captures_under_way() == 0) {
        return nullptr;
    }
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    // The latest first, like torch since 2.10.
    for (auto capture = all.captures.rbegin(); capture != all.captures.rend(); ++capture) {
        if (capture->pool.device == device && capture->filter(stream)) {
            return capture->memory;
        }
    }
    return nullptr;
}

int uses_of(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    return static_cast<int>(std::count_if(all.uses.begin(), all.uses.end(),
                                          [&](const PoolUse& use) { return use.pool == pool; }));
}

bool add_use(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto use = all.find_use(pool);
    if (use == all.uses.end()) {
        return false;
    }
    all.uses.push_back(PoolUse(*use));
    return true;
}

bool drop_use(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto use = all.find_use(pool);
    if (use == all.uses.end()) {
        return false;
    }
    all.uses.erase(use);
    return true;
}

std::optional<std::unordered_set<void*>> live_blocks(const PoolKey& pool) {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto use = all.find_use(pool);
    if (use == all.uses.end()) {
        return std::nullopt;
    }
    std::unordered_set<void*> live;
    for (const auto& [address, block] : all.blocks) {
        if (block.owner.get() == use->memory) {
            live.insert(const_cast<void*>(address));
        }
    }
    return live;
}

void out_of_memory(std::size_t bytes, c10::DeviceIndex device, const char* what) {
    const auto message =
        detail::read_text([](char* buffer, std::size_t capacity, std::size_t* needed) {
            static_cast<void>(vmmgraph_last_error_message(buffer, capacity, needed));
        });
    auto info = detail::sized<ErrorInfo>();
    static_cast<void>(vmmgraph_last_error(&info));
    throw OutOfBlocks({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                      c10::str("CUDA out of memory. Tried to allocate ", bytes, " bytes on device ",
                               static_cast<int>(device), " ", what, ": ", message),
                      info);
}

void adopt(void* block, std::shared_ptr<BlockOwner> owner, std::size_t bytes,
           c10::DeviceIndex device) {
    auto& all = registry();
    try {
        const std::lock_guard lock(all.mutex);
        all.blocks.insert_or_assign(block, Block{owner, bytes, device});
    } catch (...) {
        static_cast<void>(owner->release(block, device));
        throw;
    }
    all.blocks_alive.fetch_add(1, std::memory_order_release);
}

void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device,
                     std::size_t bytes, cudaStream_t stream) {
    using bridge::BlockKind;
    const auto kind = RemoteScope::active() ? BlockKind::Remote
                      : KeptScope::active() ? BlockKind::Kept
                                            : BlockKind::Local;
    void* const block = memory->allocate(bytes, stream, kind);
    if (block == nullptr) {
        out_of_memory(bytes, device, "for a graph capture");
    }
    adopt(block, memory, bytes, device);
    return block;
}

bool release_block(void* pointer) {
    auto& all = registry();
    if (all.blocks_alive.load(std::memory_order_acquire) == 0) {
        return false;
    }
    std::shared_ptr<BlockOwner> owner;
    c10::DeviceIndex device = 0;
    {
        const std::lock_guard lock(all.mutex);
        const auto found = all.blocks.find(pointer);
        if (found == all.blocks.end()) {
            return false;
        }
        owner = std::move(found->second.owner);
        device = found->second.device;
        all.blocks.erase(found);
    }
    all.blocks_alive.fetch_sub(1, std::memory_order_release);
    // Outside the lock: the last reference destroys the space or the region.
    static_cast<void>(owner->release(pointer, device));
    return true;
}

std::shared_ptr<BlockOwner> owner_of(const void* pointer, std::size_t* bytes) {
    auto& all = registry();
    if (pointer == nullptr || all.blocks_alive.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    const std::lock_guard lock(all.mutex);
    const auto found = all.blocks.find(pointer);
    if (found == all.blocks.end()) {
        return nullptr;
    }
    if (bytes != nullptr) {
        *bytes = found->second.bytes;
    }
    return found->second.owner;
}

}  // namespace vmmgraph::torch::registry
