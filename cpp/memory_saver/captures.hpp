// Tracks running captures: waiting for the device would invalidate a capture, and CUDA cannot
// report whether any exist. Known captures are begun through this library's cudaStreamBeginCapture
// or run on watched streams.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <shared_mutex>

#include "runtime.hpp"

namespace vmmgraph::memory_saver {

// No capture begins through this library while one exists. Construct before querying.
class NoneBegins {
public:
    NoneBegins();

    [[nodiscard]] bool capturing(const Runtime& runtime) const noexcept;

private:
    std::shared_lock<std::shared_mutex> lock_;
};

// Both return the runtime's result. `begin` runs while no thread waits for a device.
int begin_capture(const Runtime& runtime, void* stream,
                  const std::function<int(const Runtime&)>& begin);
int end_capture(const Runtime& runtime, void* stream, void** graph);

// Adds streams to query; they must live as long as the process.
void watch_streams(void* const* streams, std::size_t count);

}  // namespace vmmgraph::memory_saver
