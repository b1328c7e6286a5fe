// Owners of the blocks under torch_npu's storages, and running captures. Counterpart of
// cpp/torch/registry.hpp, without pools of several captures, regions and pauses.
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

// Memory of one capture, kept alive by the graph and by every live block.
struct Memory {
    explicit Memory(Space space) : space(std::move(space)) {}
    Space space;
    // After the capture, freeing a block waits for its last readers.
    std::atomic<bool> sealed{false};
};

struct PoolKey {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    bool operator==(const PoolKey&) const = default;
};

// Binds `memory` to the next pool this thread begins to allocate to, which is its capture; null
// withdraws.
void announce(std::shared_ptr<Memory> memory);
std::shared_ptr<Memory> announced();

using Filter = std::function<bool(void*)>;
void begin_capture(const PoolKey& pool, Filter filter, std::shared_ptr<Memory> memory);
// Returns false if the pool has no capture.
bool end_capture(const PoolKey& pool);
std::size_t captures_under_way();
// Memory of the capture the stream belongs to by torch_npu's filter; null if none.
std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, void* stream);

// Allocates a block for a storage. Throws torch's out-of-memory error, or Error otherwise.
void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device,
                     std::size_t bytes, void* stream);
// Frees a block; torch_npu's current stream may still read it. Returns false if `block` is not one.
// Never throws: torch frees in destructors.
bool release_block(void* block) noexcept;
// Owner of a live block, and optionally its size; null for any other pointer.
std::shared_ptr<Memory> owner_of(const void* block, std::size_t* bytes = nullptr);

}  // namespace vmmgraph::torch_npu
