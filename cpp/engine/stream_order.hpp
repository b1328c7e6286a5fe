// Work that others have to come behind, on whatever stream it was given.
#pragma once

#include <optional>
#include <thread>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::engine {

// Throws Error if a stream of the current device cannot be given anything without a capture noticing: it is under capture, or it is the legacy
// default stream and one that waits for it is. Touches no capture.
void refuse_captured(void* stream);

// Where some work was given last, and what runs behind that. Its streams are of one device, whichever is current.
//
// A stream that is only noted must exist, and while it is captured nothing can come behind it; what is marked is an event, and names no stream.
class StreamOrder {
public:
    explicit StreamOrder(c10::Device device) noexcept : device_(device) {}
    StreamOrder(const StreamOrder&) = delete;
    StreamOrder& operator=(const StreamOrder&) = delete;
    ~StreamOrder();

    // It was given to `stream`, behind what was given before. `lasts`: that one is there as long as the process.
    void note(void* stream, bool lasts = false) noexcept;
    // Whether the noted stream, if any, will be there whenever somebody asks: CUDA ends the process where a destroyed one is named.
    [[nodiscard]] bool may_be_named_later() const noexcept { return !noted_ || noted_lasts_; }
    // Puts a mark behind all that the noted stream has, if there is none. Throws Error while that is captured, with the capture as it was.
    void mark();
    // As mark(), and whoever comes behind it finds out where that cannot be.
    void try_mark() noexcept;
    // What `stream` gets from now on runs behind it; the caller has seen that this is not captured. Throws Error as mark().
    void before(void* stream);
    // note() and before().
    void behind(void* first, void* second) {
        note(first);
        before(second);
    }
    // Blocks until it is over; throws Error as mark().
    void wait();

private:
    c10::Device device_;
    // Without a mark yet.
    std::optional<cudaStream_t> noted_;
    bool noted_lasts_ = false;
    // Who noted it: each thread has a default stream of its own, by one handle.
    std::thread::id noted_by_;
    bool marked_ = false;
    cudaEvent_t event_ = nullptr;
};

// Marks when it goes, whatever was thrown; null: nothing.
class MarkWhenLeft {
public:
    explicit MarkWhenLeft(StreamOrder* order) noexcept : order_(order) {}
    MarkWhenLeft(const MarkWhenLeft&) = delete;
    MarkWhenLeft& operator=(const MarkWhenLeft&) = delete;
    ~MarkWhenLeft() {
        if (order_ != nullptr) {
            order_->try_mark();
        }
    }

private:
    StreamOrder* order_;
};

}  // namespace vmmgraph::engine
