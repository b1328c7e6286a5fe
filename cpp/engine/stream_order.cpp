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
               "a stream that this would use or wait for is under capture, or cannot be used during another one's");
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
    // A hook of the engine's may have left another one.
    const torch::OnDevice current(device_);
    // Another thread's default stream cannot be named; the legacy one waits for it.
    const bool anothers = *noted_ == cudaStreamPerThread && noted_by_ != std::this_thread::get_id();
    auto* const stream = anothers ? cudaStreamLegacy : *noted_;
    if (stream == nullptr || stream == cudaStreamLegacy) {
        // Beside a capture on a stream that waits for it, a record there would break that.
        refuse_captured(stream);
    }
    if (event_ == nullptr) {
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    }
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
    // Of a stream under capture the event is one of the capture's, which breaks when somebody asks for it, and which whoever waits for it becomes
    // part of; recorded it does nothing, and it serves to be recorded again. Asked behind that, since another thread may begin a capture at any time.
    refuse_captured(stream);
    noted_.reset();
    marked_ = true;
}

void StreamOrder::try_mark() noexcept {
    try {
        mark();
    } catch (...) {
        // It is only noted still.
    }
}

void StreamOrder::before(void* stream) {
    const auto second = static_cast<cudaStream_t>(stream);
    if (noted_ == second && (second != cudaStreamPerThread || noted_by_ == std::this_thread::get_id())) {
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
        // In the mode of a thread that has set none, it would break every capture of other threads.
        const torch::Relaxed relaxed;
        C10_CUDA_CHECK(cudaEventSynchronize(event_));
    }
}

}  // namespace vmmgraph::engine
