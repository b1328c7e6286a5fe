// Fixture of the C++ tests: small arenas on the host driver or a stand-in (platform.hpp), each on
// its own device.
#pragma once

#include <cstring>
#include <vmmgraph/vmmgraph.hpp>

#include "platform.hpp"

namespace host {

constexpr std::size_t MiB = std::size_t{1} << 20;

inline vmmgraph::Options options() {
    vmmgraph::Options options;
    options.driver = static_cast<vmmgraph::DriverChoice>(platform_under_test());
    if (options.driver == vmmgraph::DriverChoice::host) {
        options.host_granularity_bytes = 4096;
        options.host_memory_bytes = 256 * MiB;
    }
    options.small_page_bytes = 64 << 10;
    options.large_page_bytes = MiB;
    return options;
}

inline vmmgraph::DeviceOptions device_options(int device) {
    const vmmgraph::Options from = options();
    return {from.driver, device, from.device_budget_bytes, from.host_granularity_bytes,
            from.host_memory_bytes};
}

inline vmmgraph::SharedVmmAllocator arena(int device = 0) {
    return vmmgraph::SharedVmmAllocator(device, options());
}

inline void fill(void* block, std::size_t bytes, int value) { std::memset(block, value, bytes); }

inline bool holds(const void* block, std::size_t bytes, int value) {
    const auto* at = static_cast<const unsigned char*>(block);
    for (std::size_t i = 0; i < bytes; ++i) {
        if (at[i] != static_cast<unsigned char>(value)) {
            return false;
        }
    }
    return true;
}

}  // namespace host
