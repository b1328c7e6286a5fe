// Whose the blocks under torch_npu's storages are, and which captures are under way. What cpp/torch/registry.hpp is for CUDA, without its pools of
// several captures, regions and pauses.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch_npu {

// One capture's memory. Its graph keeps it, and every live block.
struct Memory {
    explicit Memory(Space space) : space(std::move(space)) {}
    Space space;
    // The capture is over, so that a block's last readers have to be waited for.
    std::atomic<bool> sealed{false};
};

struct PoolKey {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    bool operator==(const PoolKey&) const = default;
};

// Announces that the next pool this thread begins to allocate to is the capture of `memory`; null takes that back.
void announce(std::shared_ptr<Memory> memory);
std::shared_ptr<Memory> announced();

using Filter = std::function<bool(void*)>;
void begin_capture(const PoolKey& pool, Filter filter, std::shared_ptr<Memory> memory);
// Whether it was under way.
bool end_capture(const PoolKey& pool);
// How many are. Costs one load.
std::size_t captures_under_way();
// The memory of the capture the stream takes part in, by torch_npu's own filter.
std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, void* stream);

// A block for a storage. Throws torch's own out-of-memory error, and Error for everything else.
void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device, std::size_t bytes, void* stream);
// Frees a block, which torch_npu's current stream may still read; whether it was one. Never throws: torch frees in destructors.
bool release_block(void* block) noexcept;
// Whose a live block is, and its size if asked for; null for everything else.
std::shared_ptr<Memory> owner_of(const void* block, std::size_t* bytes = nullptr);

}  // namespace vmmgraph::torch_npu
