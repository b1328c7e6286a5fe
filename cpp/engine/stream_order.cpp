#include "stream_order.hpp"

#include <c10/cuda/CUDAException.h>

#include "../torch/on_device.hpp"
#include "declare.hpp"

namespace vmmgraph::engine {

void refuse_captured(void* stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto asked = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
    if (asked == cudaErrorStreamCaptureImplicit) {
        static_cast<void>(cudaGetLastError());
    } else {
        C10_CUDA_CHECK(asked);
    }
    if (asked != cudaSuccess || status != cudaStreamCaptureStatusNone) {
        refuse(VMMGRAPH_ERROR_STREAM_CAPTURING,
               "cannot use the stream: it or a stream to wait for is under capture, or another "
               "capture forbids its use; end the capture "
               "first");
    }
}

StreamOrder::~StreamOrder() {
    if (event_ != nullptr) {
        C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event_));
    }
}

void StreamOrder::note(void* stream, bool lasts) noexcept {
    noted_ = static_cast<cudaStream_t>(stream);
    noted_lasts_ = lasts;
    noted_by_ = std::this_thread::get_id();
    marked_ = false;
}

void StreamOrder::mark() {
    if (!noted_) {
        return;
    }
    // A hook of the engine may have changed the current device.
    const torch::OnDevice current(device_);
    // Another thread's per-thread default stream cannot be named; the legacy stream waits for its
    // work.
    const bool anothers = *noted_ == cudaStreamPerThread && noted_by_ != std::this_thread::get_id();
    auto* const stream = anothers ? cudaStreamLegacy : *noted_;
    if (stream == nullptr || stream == cudaStreamLegacy) {
        // A record here would break captures on streams which wait for the legacy stream.
        refuse_captured(stream);
    }
    if (event_ == nullptr) {
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    }
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
    // Under capture, the record only makes the event part of the capture, and the event can be
    // recorded again. A later query would break the capture, and a waiter would join the capture.
    // Checked after the record, since another thread may begin a capture at any time.
    refuse_captured(stream);
    noted_.reset();
    marked_ = true;
}

void StreamOrder::try_mark() noexcept {
    try {
        mark();
    } catch (...) {
        // The stream stays noted, without a mark.
    }
}

void StreamOrder::before(void* stream) {
    const auto second = static_cast<cudaStream_t>(stream);
    if (noted_ == second &&
        (second != cudaStreamPerThread || noted_by_ == std::this_thread::get_id())) {
        return;
    }
    mark();
    if (marked_) {
        const torch::OnDevice current(device_);
        C10_CUDA_CHECK(cudaStreamWaitEvent(second, event_, 0));
    }
}

void StreamOrder::wait() {
    mark();
    if (marked_) {
        const torch::OnDevice current(device_);
        // In a thread's default capture mode, the wait would break the captures of other threads.
        const torch::Relaxed relaxed;
        C10_CUDA_CHECK(cudaEventSynchronize(event_));
    }
}

}  // namespace vmmgraph::engine
