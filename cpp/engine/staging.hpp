// Two pinned buffers that travel to the device in turn.
#pragma once

#include <array>
#include <cstddef>

#include <c10/core/Device.h>

namespace vmmgraph::engine {

// While the copy from one buffer is under way the other can be written. Without a CUDA device: plain memory, and copies that are done
// when they return.
class Staging {
public:
    // On a thread that is Relaxed (on_device.hpp), since other threads may capture.
    Staging(c10::Device device, std::size_t bytes);
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    // Waits for the copies under way.
    ~Staging();

    // The buffer to write, when its last copy is done.
    std::byte* write();
    // Copies its first `bytes` to `to`, in order on `stream`, and turns to the other buffer. On failure it is the same one still. By a kernel: on
    // torch's current stream, which is that one.
    void send(void* to, std::size_t bytes, void* stream, bool by_kernel);

private:
    struct Buffer {
        std::byte* memory = nullptr;
        // The same memory as the device sees it.
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
