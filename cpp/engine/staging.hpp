// Two pinned staging buffers, copied to the device alternately.
#pragma once

#include <array>
#include <cstddef>

#include <c10/core/Device.h>

namespace vmmgraph::engine {

// Double buffer: one buffer can be written while the other is copied. Without a CUDA device: plain
// memory and synchronous copies.
class Staging {
public:
    // The thread must be Relaxed (on_device.hpp), since other threads may capture.
    Staging(c10::Device device, std::size_t bytes);
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    // Waits for running copies.
    ~Staging();

    // Returns the buffer to write, after its last copy.
    std::byte* write();
    // Copies the buffer's first `bytes` to `to`, in order on `stream`, and switches buffers, unless
    // the call fails. With `by_kernel`, `stream` must be torch's current stream.
    void send(void* to, std::size_t bytes, void* stream, bool by_kernel);

private:
    struct Buffer {
        std::byte* memory = nullptr;
        // Device address of the memory.
        void* on_device = nullptr;
        // A cudaEvent_t.
        void* sent = nullptr;
        bool under_way = false;
    };

    void release() noexcept;

    c10::Device device_;
    std::array<Buffer, 2> buffers_{};
    std::size_t turn_ = 0;
};

}  // namespace vmmgraph::engine
