// Ordering of work after earlier work on any stream.
#pragma once

#include <optional>
#include <thread>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::engine {

// Throws Error if a capture would notice work on this stream of the current device: the stream is
// under capture, or is the legacy default stream while a stream which waits for the legacy stream
// is. Disturbs no capture.
void refuse_captured(void* stream);

// Records the stream of some work, and orders later work after this work. All streams are on one
// device, which need not be the current one.
//
// A noted stream must exist, and allows no later order while under capture. Marked work is an event
// and names no stream.
class StreamOrder {
public:
    explicit StreamOrder(c10::Device device) noexcept : device_(device) {}
    StreamOrder(const StreamOrder&) = delete;
    StreamOrder& operator=(const StreamOrder&) = delete;
    ~StreamOrder();

    // Notes work on `stream`, after earlier noted work. `lasts`: the stream exists as long as the
    // process.
    void note(void* stream, bool lasts = false) noexcept;
    // Returns true if the noted stream, if any, may be named at any time: CUDA ends the process if
    // a destroyed stream is named.
    [[nodiscard]] bool may_be_named_later() const noexcept { return !noted_ || noted_lasts_; }
    // Marks all work of the noted stream, unless already marked. Throws Error while the stream is
    // under capture, which stays intact.
    void mark();
    // As mark(), without errors: a later caller finds the failure.
    void try_mark() noexcept;
    // Makes later work of `stream`, which must not be under capture, run after the noted work.
    // Throws Error as mark().
    void before(void* stream);
    // note() and before().
    void behind(void* first, void* second) {
        note(first);
        before(second);
    }
    // Blocks until the work is done. Throws Error as mark().
    void wait();

private:
    c10::Device device_;
    // Without a mark yet.
    std::optional<cudaStream_t> noted_;
    bool noted_lasts_ = false;
    // The noting thread: each thread's default stream has the same handle.
    std::thread::id noted_by_;
    bool marked_ = false;
    cudaEvent_t event_ = nullptr;
};

// Marks at destruction, also after an exception; null: no effect.
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
