// Platform of the C and C++ interface tests: the host, or the stand-in named by
// VMMGRAPH_TEST_PLATFORM.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vmmgraph/vmmgraph.h>

inline std::int32_t platform_under_test() {
    const char* const set = std::getenv("VMMGRAPH_TEST_PLATFORM");
    const std::string name = set == nullptr ? "host" : set;
    return name == "cuda"     ? VMMGRAPH_DRIVER_CUDA
           : name == "hip"    ? VMMGRAPH_DRIVER_HIP
           : name == "ascend" ? VMMGRAPH_DRIVER_ASCEND
           : name == "mlu"    ? VMMGRAPH_DRIVER_MLU
                              : VMMGRAPH_DRIVER_HOST;
}
