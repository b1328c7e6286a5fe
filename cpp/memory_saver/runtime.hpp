// The program's CUDA runtime. Looked up, not linked: linking would add a second runtime to the
// process.
#pragma once

#include <cstddef>

namespace vmmgraph::memory_saver {

struct Runtime {
    int (*malloc)(void** ptr, std::size_t bytes);
    int (*free)(void* ptr);
    int (*get_device)(int* device);
    int (*set_device)(int device);
    int (*mem_get_info)(std::size_t* free, std::size_t* total);
    int (*device_synchronize)();
    int (*stream_is_capturing)(void* stream, int* status);
    int (*get_last_error)();
    int (*stream_begin_capture)(void* stream, int mode);
    int (*stream_end_capture)(void* stream, void** graph);
    // Null if the program's runtime has none.
    int (*memcpy)(void* to, const void* from, std::size_t bytes, int kind);
    int (*host_register)(void* at, std::size_t bytes, unsigned flags);
    int (*host_unregister)(void* at);
    // Null before CUDA 12.3.
    int (*stream_begin_capture_to_graph)(void* stream, void* graph, const void* dependencies,
                                         const void* data, std::size_t count, int mode);

    // Returns null while the program has no runtime; the next call searches again, since Python
    // loads it late.
    static const Runtime* find() noexcept;

    // Waits until the device is idle. Returns `capturing`, without harm, if a capture is known
    // (captures.hpp) or runs on a blocking stream. Keeps the current device and the runtime's last
    // error.
    int wait_for(int device) const;

    // Errors as in wait_for().
    int free_bytes(int device, std::size_t* bytes) const noexcept;

    // Copies between host and device, and waits.
    int copy(int device, void* to, const void* from, std::size_t bytes) const noexcept;

    // Returns whether the driver pinned the memory, for faster copies.
    bool register_host(void* at, std::size_t bytes) const noexcept;
    void unregister_host(void* at) const noexcept;

    // Makes "out of memory" the runtime's last error, like a failed cudaMalloc.
    void set_out_of_memory() const noexcept;
};

}  // namespace vmmgraph::memory_saver
