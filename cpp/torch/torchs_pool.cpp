#include "torchs_pool.hpp"

#include <utility>
#include <vector>

#include <torch/version.h>
#include <vmmgraph/torch.hpp>

#include "guards.hpp"
#include "on_device.hpp"
#include "registry.hpp"
#include "workspace.hpp"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Segments of a torch pool, and whether any block in them is live.
struct Held {
    std::vector<std::pair<std::size_t, std::size_t>> segments;
    bool alive = false;

    Held(c10::DeviceIndex device, const compat::PoolId& pool) {
        for (const auto& segment : caching::snapshot().segments) {
            if (segment.device == device && segment.owner_private_pool_id == pool) {
                segments.emplace_back(segment.address, segment.total_size);
                alive = alive || segment.active_size > 0;
            }
        }
    }
    [[nodiscard]] bool has(const void* address) const {
        const auto at = reinterpret_cast<std::size_t>(address);
        for (const auto& [begin, bytes] : segments) {
            if (at >= begin && at - begin < bytes) {
                return true;
            }
        }
        return false;
    }
};

// Torch frees the cached segments of an unused pool and creates the pool again when allocated to.
template <class Id>
void free_and_make_anew(c10::DeviceIndex device, const Id& pool) {
    if constexpr (requires { caching::emptyCache(pool); }) {
        caching::releasePool(device, pool);
        try {
            caching::emptyCache(pool);
        } catch (const c10::Error&) {
            // The pool still exists: torch throws below.
        }
        // Throws if the pool exists without users.
        caching::beginAllocateToPool(device, pool, [](cudaStream_t) { return false; });
        caching::endAllocateToPool(device, pool);
    }
}

template <class Id>
constexpr bool possible = requires(const Id& pool) { caching::emptyCache(pool); };

}  // namespace

int torchs_uses_of(c10::DeviceIndex device, const compat::PoolId& pool) {
    try {
        return compat::uses_of_pool(*registry::native(), device, pool);
    } catch (const c10::Error&) {
        // Torch throws for a pool only named by graph_pool_handle() (seen with torch 2.11 on a
        // GPU).
        return 0;
    }
}

void empty_torchs_pool(c10::DeviceIndex device, const compat::PoolId& pool) {
    require_release();
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot empty the pool: the allocator is not installed; call vmmgraph_torch_install "
               "first");
    }
    if (!possible<compat::PoolId>) {
        refuse(VMMGRAPH_ERROR_UNSUPPORTED, "cannot empty the pool: torch " TORCH_VERSION
                                           " does not empty single pools; use torch 2.8 or later");
    }
    if (device < 0 || registry::uses_of({device, pool}) > 0 || torchs_uses_of(device, pool) != 1) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot empty the pool: it belongs to captures or has " +
                   std::to_string(torchs_uses_of(device, pool)) +
                   " uses instead of 1; destroy its graphs and other users first");
    }
    const OnDevice current({c10::kCUDA, device});
    const Relaxed relaxed;
    const Held held(device, pool);
    if (held.segments.empty()) {
        return;
    }
    forget_workspaces([&](const void* workspace) { return held.has(workspace); });
    if (Held(device, pool).alive || !compat::may_destroy_pools(device)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot empty the pool: it has live memory, or a capture or pool allocation is "
               "running on the device; end these first");
    }
    try {
        free_and_make_anew(device, pool);
    } catch (const c10::Error& error) {
        refuse(VMMGRAPH_ERROR_INTERNAL,
               std::string("cannot empty the pool: another thread began to use it, and it is lost; "
                           "never use it again. Torch: ") +
                   error.what_without_backtrace());
    }
}

}  // namespace vmmgraph::torch
