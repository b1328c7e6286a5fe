// Torch's own pools that an arena replaces.
#pragma once

#include <c10/core/Device.h>

#include "compat.hpp"

namespace vmmgraph::torch {

// Number of uses of a pool counted by torch; 0 if unknown.
int torchs_uses_of(c10::DeviceIndex device, const compat::PoolId& pool);

// Implements vmmgraph_torch_pool_empty() of torch_c.h.
void empty_torchs_pool(c10::DeviceIndex device, const compat::PoolId& pool);

}  // namespace vmmgraph::torch
