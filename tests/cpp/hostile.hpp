// Fixture of the hostile tests.
#pragma once
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <string>

#include "platform.hpp"

template <class Struct>
Struct sized() {
    Struct value{};
    value.struct_size = sizeof(Struct);
    return value;
}

// 64 MiB, granularity 4 KiB.
inline vmmgraph_device_options_t small_device(std::int32_t number) {
    auto options = sized<vmmgraph_device_options_t>();
    options.driver = platform_under_test();
    options.device = number;
    if (options.driver == VMMGRAPH_DRIVER_HOST) {
        options.host_granularity_bytes = 4096;
        options.host_memory_bytes = 64 << 20;
    }
    return options;
}

// Expects no memory on the device.
inline void close_empty(vmmgraph_device_t device) {
    ASSERT_EQ(vmmgraph_device_trim(device, nullptr), VMMGRAPH_OK);
    auto stats = sized<vmmgraph_device_stats_t>();
    ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.physical_bytes, 0U);
    EXPECT_EQ(stats.reserved_bytes, 0U);
    ASSERT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
}

template <class Handle>
Handle garbage(std::uint64_t value) {
    return reinterpret_cast<Handle>(value);
}

inline std::string last_message() {
    char text[256];
    EXPECT_EQ(vmmgraph_last_error_message(text, sizeof text, nullptr), VMMGRAPH_OK);
    return text;
}
