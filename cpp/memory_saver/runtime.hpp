// The CUDA runtime of the program. It is looked for and not linked: which one a program has is its own business, and a runtime of ours
// beside it would be a second one.
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
    // Null before CUDA 12.3.
    int (*stream_begin_capture_to_graph)(void* stream, void* graph, const void* dependencies, const void* data, std::size_t count,
                                         int mode);

    // Null while the program has none. Looked for again then, since Python loads it late.
    static const Runtime* find() noexcept;

    // Waits until the device does nothing more, or returns the error that stands against it: capturing, without harm to a capture that
    // is known (captures.hpp) or on a stream that the default stream waits for. The current device stays what it is, and so does the last error but for its own.
    int wait_for(int device) const;

    // Free bytes of a device; an error as above.
    int free_bytes(int device, std::size_t* bytes) const noexcept;

    // Makes "out of memory" the last error, as a failed cudaMalloc does: there is no other way to set it.
    void set_out_of_memory() const noexcept;
};

}  // namespace vmmgraph::memory_saver
