// Pools of torch's own, as an arena sees them that takes their place.
#pragma once

#include <c10/core/Device.h>

#include "compat.hpp"

namespace vmmgraph::torch {

// How often torch's own allocator has a pool in use; 0 for one that it does not know, or where a release does not tell.
int torchs_uses_of(c10::DeviceIndex device, const compat::PoolId& pool);

// vmmgraph_torch_pool_empty() of torch_c.h.
void empty_torchs_pool(c10::DeviceIndex device, const compat::PoolId& pool);

}  // namespace vmmgraph::torch
