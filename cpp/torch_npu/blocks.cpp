#include "blocks.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

namespace vmmgraph::torch_npu {
namespace {

struct Block {
    std::shared_ptr<Memory> memory;
    std::size_t bytes;
    c10::DeviceIndex device;
};

struct Capture {
    PoolKey pool;
    Filter filter;
    std::shared_ptr<Memory> memory;
};

struct BlockTable {
    std::mutex mutex;
    std::unordered_map<const void*, Block> blocks;
    std::vector<Capture> captures;
    // Read without the mutex, so allocations outside captures cost one load.
    std::atomic<std::size_t> under_way{0};
    std::atomic<std::size_t> alive{0};
};

// Never destroyed: tensors in static storage are freed after this library's destructors would have
// run.
BlockTable& block_table() {
    static auto* const instance = new BlockTable;
    return *instance;
}

thread_local std::shared_ptr<Memory> next;

bool out_of_memory(vmmgraph_status_t status) {
    return (status >= VMMGRAPH_ERROR_OUT_OF_MEMORY &&
            status <= VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS) ||
           status == VMMGRAPH_ERROR_INVALID_SIZE;
}

}  // namespace

void announce(std::shared_ptr<Memory> memory) { next = std::move(memory); }
std::shared_ptr<Memory> announced() { return std::exchange(next, nullptr); }

void begin_capture(const PoolKey& pool, Filter filter, std::shared_ptr<Memory> memory) {
    auto& all = block_table();
    const std::lock_guard lock(all.mutex);
    all.captures.push_back({pool, std::move(filter), std::move(memory)});
    all.under_way.fetch_add(1, std::memory_order_release);
}

bool end_capture(const PoolKey& pool) {
    auto& all = block_table();
    Capture ended{};
    const std::lock_guard lock(all.mutex);
    const auto found = std::find_if(all.captures.begin(), all.captures.end(),
                                    [&](const Capture& one) { return one.pool == pool; });
    if (found == all.captures.end()) {
        return false;
    }
    ended = std::move(*found);
    all.captures.erase(found);
    all.under_way.fetch_sub(1, std::memory_order_release);
    return true;
}

std::size_t captures_under_way() { return block_table().under_way.load(std::memory_order_acquire); }

std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, void* stream) {
    if (captures_under_way() == 0) {
        return nullptr;
    }
    auto& all = block_table();
    const std::lock_guard lock(all.mutex);
    for (auto capture = all.captures.rbegin(); capture != all.captures.rend(); ++capture) {
        if (capture->pool.device == device && capture->filter(stream)) {
            return capture->memory;
        }
    }
    return nullptr;
}

void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device,
                     std::size_t bytes, void* stream) {
    void* block = nullptr;
    try {
        block = memory->space.allocate(bytes, stream);
    } catch (const Error& error) {
        if (!out_of_memory(error.status())) {
            throw;
        }
        TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", bytes,
                         " bytes on device ", static_cast<int>(device),
                         " for a graph capture: ", error.what());
    }
    auto& all = block_table();
    try {
        const std::lock_guard lock(all.mutex);
        all.blocks.insert_or_assign(block, Block{memory, bytes, device});
    } catch (...) {
        memory->space.free(block);
        throw;
    }
    all.alive.fetch_add(1, std::memory_order_release);
    return block;
}

bool release_block(void* block) noexcept {
    auto& all = block_table();
    if (all.alive.load(std::memory_order_acquire) == 0) {
        return false;
    }
    Block was{};
    {
        const std::lock_guard lock(all.mutex);
        const auto found = all.blocks.find(block);
        if (found == all.blocks.end()) {
            return false;
        }
        was = std::move(found->second);
        all.blocks.erase(found);
    }
    all.alive.fetch_sub(1, std::memory_order_release);
    // Outside the lock: the last reference destroys the space.
    try {
        if (was.memory->sealed.load(std::memory_order_acquire)) {
            // Programs drop tensors while work on this stream still reads their bytes. stream()
            // drains torch_npu's queue.
            was.memory->space.record_stream(block,
                                            c10_npu::getCurrentNPUStream(was.device).stream());
        }
    } catch (...) {
        // Torch_npu and its streams are shutting down.
    }
    try {
        was.memory->space.free(block);
    } catch (...) {
        // The block stays in the space until the space is destroyed.
    }
    return true;
}

std::shared_ptr<Memory> owner_of(const void* block, std::size_t* bytes) {
    auto& all = block_table();
    if (block == nullptr || all.alive.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    const std::lock_guard lock(all.mutex);
    const auto found = all.blocks.find(block);
    if (found == all.blocks.end()) {
        return nullptr;
    }
    if (bytes != nullptr) {
        *bytes = found->second.bytes;
    }
    return found->second.memory;
}

}  // namespace vmmgraph::torch_npu
