// What outlives every install and uninstall: blocks that tensors still own, captures under way, pools that torch will release.
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

// One capture's pool, and the empty one of the same id that the native allocator has.
struct PoolKey {
    c10::DeviceIndex device;
    compat::PoolId id;
    bool operator==(const PoolKey&) const = default;
};

// The allocator under ours; set by the first install and never cleared, since deleters may come later.
compat::CUDAAllocator* native();
void set_native(compat::CUDAAllocator* native);

// A capture begins: its filter tells which streams take part. The pool is in use until it is released.
void begin_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter, std::shared_ptr<Memory> memory);
// Whether it was under way. It may go on: programs end a capture's pool and begin it again to allocate elsewhere in between, and only
// forget_capture() says that they did not. `end_is_marked`: torch has told that it counts it no more.
bool end_capture(const PoolKey& pool, bool end_is_marked = false);
// As end_capture(), of the capture into this memory only.
bool end_capture_into(const PoolKey& pool, const Memory* memory);
// Whether a capture is under way that uses the pool, or has ended it and may go on.
bool is_captured_into(const PoolKey& pool);
// The memory of a capture whose pool ended and that may go on; null if there is none.
std::shared_ptr<Memory> paused_memory(const PoolKey& pool);
// As begin_capture, for one that goes on: the pool is in use already.
void resume_capture(const PoolKey& pool, std::function<bool(cudaStream_t)> filter, const std::shared_ptr<Memory>& memory);
// It is over.
void forget_capture(const Memory* memory) noexcept;
// How many are. Costs one load.
std::size_t captures_under_way();
// Torch counts the device's capture that this thread began last (2.13 and later).
void mark_begun(c10::DeviceIndex device);
// Whether torch still counts a capture into this memory, null: any, by that pool; it is not asked twice.
bool take_mark(const PoolKey& pool, const Memory* memory);
// The memory of the capture the stream takes part in, by torch's own filter: helper threads and forked streams count too.
std::shared_ptr<Memory> memory_of(c10::DeviceIndex device, cudaStream_t stream);

// How often a pool is in use; 0: it is torch's.
int uses_of(const PoolKey& pool);
// Whether it is a capture's.
bool add_use(const PoolKey& pool);
bool drop_use(const PoolKey& pool);
// The live blocks of a capture's pool; nothing if it is torch's.
std::optional<std::unordered_set<void*>> live_blocks(const PoolKey& pool);

// Torch's own out-of-memory error, for a block: with the library's numbers, which say what ran out.
class OutOfBlocks final : public c10::OutOfMemoryError {
public:
    OutOfBlocks(c10::SourceLocation where, std::string message, const ErrorInfo& info)
        : c10::OutOfMemoryError(where, std::move(message)), info_(info) {}
    [[nodiscard]] vmmgraph_status_t status() const noexcept { return info_.status; }

private:
    ErrorInfo info_;
};

// Throws it, with what the memory was for ("for a graph capture").
[[noreturn]] void out_of_memory(std::size_t bytes, c10::DeviceIndex device, const char* what);
// Notes a block that torch gets; if that fails, it is freed.
void adopt(void* block, std::shared_ptr<BlockOwner> owner, std::size_t bytes, c10::DeviceIndex device);
// A block for torch, of the kind that this thread's scopes say. Throws OutOfBlocks.
void* allocate_block(const std::shared_ptr<Memory>& memory, c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream);
// Frees a block; whether it was one.
bool release_block(void* pointer);
// Whom a live block belongs to, and its size if asked for; null for everything else.
std::shared_ptr<BlockOwner> owner_of(const void* pointer, std::size_t* bytes = nullptr);

}  // namespace vmmgraph::torch::registry
