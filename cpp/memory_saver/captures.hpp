// Which captures are under way: a wait for the device would end them, and no function of CUDA's says whether there is one. Known are those
// that begin through this library's own cudaStreamBeginCapture, and those on streams that it was told of.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <shared_mutex>

#include "runtime.hpp"

namespace vmmgraph::memory_saver {

// While one lives, no capture begins through this library. Taken before it is asked whether there is one.
class NoneBegins {
public:
    NoneBegins();

    // Whether one is under way.
    [[nodiscard]] bool capturing(const Runtime& runtime) const noexcept;

private:
    std::shared_lock<std::shared_mutex> lock_;
};

// The runtime's own result. `begin` is called while nobody waits for a device.
int begin_capture(const Runtime& runtime, void* stream, const std::function<int(const Runtime&)>& begin);
int end_capture(const Runtime& runtime, void* stream, void** graph);

// Streams to ask; they live as long as the process. Each is noted once.
void watch_streams(void* const* streams, std::size_t count);

}  // namespace vmmgraph::memory_saver
