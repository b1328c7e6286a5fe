// Process-wide state that outlives install() and uninstall(): live blocks, running captures, pools
// that torch will release.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include "block_owner.hpp"
#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch::registry {

// Pool of one capture; the native allocator has an empty pool with the same id.
struct PoolKey {
    c10::DeviceIndex device;
    compat::PoolId id;
    bool operator==(const PoolKey&) const = default;
};

// The allocator under this library's; set by the first install and never cleared, since deleters
// may run later.
compat::CUDAAllocator* native();
void set_native(compat::CUDAAllocator* native);

// Registers a capture; its filter selects the participating streams. The pool is in use until
// released.
void begin_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter,
                   std::shared_ptr<Memory> memory);
// Ends the capture of a pool; false if there is none. The capture may continue: programs end its
// pool, allocate elsewhere and begin the pool again. `end_is_marked`: torch no longer counts the
// capture.
bool end_capture(const PoolKey& pool, bool end_is_marked = false);
// Like end_capture(), only for the capture into this memory.
bool end_capture_into(const PoolKey& pool, const Memory* memory);
// True if a capture uses the pool, or has ended the pool and may continue.
bool is_captured_into(const PoolKey& pool);
// Memory of a capture that ended its pool and may continue; null if none.
std::shared_ptr<Memory> paused_memory(const PoolKey& pool);
// Like begin_capture(), for a continued capture, whose pool is in use already.
void resume_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter,
                    const std::shared_ptr<Memory>& memory);
void forget_capture(const Memory* memory) noexcept;
// Number of running captures. Costs one load.
std::size_t captures_under_way();
// Marks this thread's latest capture on the device as counted by torch (2.13 and later).
void mark_begun(c10::DeviceIndex device);
// Returns whether torch still counts a capture into this memory (null: any) by the pool, and clears
// the mark.
bool take_mark(const PoolKey& pool, const Memory* memory);
// Memory of the capture the stream belongs to by torch's filter; null if none.
std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, cudaStream_t stream);

// Uses of a capture's pool; 0 for a pool of torch.
int uses_of(const PoolKey& pool);
// Both return false if the pool does not belong to a capture.
bool add_use(const PoolKey& pool);
bool drop_use(const PoolKey& pool);
std::optional<std::unordered_set<void*>> live_blocks(const PoolKey& pool);

class OutOfBlocks final : public c10::OutOfMemoryError {
public:
    OutOfBlocks(c10::SourceLocation where, std::string message, const ErrorInfo& info)
        : c10::OutOfMemoryError(where, std::move(message)), info_(info) {}
    [[nodiscard]] vmmgraph_status_t status() const noexcept { return info_.status; }

private:
    ErrorInfo info_;
};

[[noreturn]] void out_of_memory(std::size_t bytes, c10::DeviceIndex device, const char* what);
// Registers a block for torch, or frees it on failure.
void adopt(void* block, std::shared_ptr<BlockOwner> owner, std::size_t bytes,
           c10::DeviceIndex device);
// Allocates a block of the kind chosen by this thread's scopes. Throws OutOfBlocks.
void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device,
                     std::size_t bytes, cudaStream_t stream);
// Frees a block. Returns false if `pointer` is not one.
bool release_block(void* pointer);
// Owner of a live block, and optionally its size; null for any other pointer.
std::shared_ptr<BlockOwner> owner_of(const void* pointer, std::size_t* bytes = nullptr);

}  // namespace vmmgraph::torch::registry
