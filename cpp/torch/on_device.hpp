// Thread state of the CUDA runtime and torch: current device, current stream, capture mode,
// captures.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

// Makes a device current during its lifetime; does nothing for a CPU. Almost any runtime call
// creates a context on the current device, to which the default stream belongs.
//
// Costs one cudaGetDevice if already current; torch's guards also query the driver at the end.
// Never throws: if it fails, the driver has shut down and later calls fail too.
class OnDevice {
public:
    explicit OnDevice(c10::Device device) noexcept {
        int current = -1;
        if (!device.is_cuda() ||
            (cudaGetDevice(&current) == cudaSuccess && current == device.index())) {
            return;
        }
        try {
            guard_.emplace(device);
        } catch (...) {
            static_cast<void>(cudaGetLastError());
        }
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    std::optional<c10::cuda::CUDAGuard> guard_;
};

// Returns true if a stream is under capture, also an invalidated one.
inline bool is_capturing(cudaStream_t stream) noexcept {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
        return status != cudaStreamCaptureStatusNone;
    }
    // Torch checks for errors at its next launch.
    static_cast<void>(cudaGetLastError());
    return false;
}

// Returns torch's handle of a stream: null for cudaStreamLegacy, whose odd value torch would take
// for one of its own streams.
inline cudaStream_t handle_of(void* stream) noexcept {
    const auto handle = static_cast<cudaStream_t>(stream);
    return handle == cudaStreamLegacy ? nullptr : handle;
}

// Returns true for the default stream and torch's pool streams, which live as long as the process.
// Torch names external streams by their handles.
inline bool lasts(const c10::cuda::CUDAStream& stream) noexcept {
    try {
        return stream.id() == 0 ||
               stream.id() !=
                   static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(stream.stream()));
    } catch (...) {
        // Not a stream known to torch.
        return false;
    }
}

// Stream of the last launch. Thread-safe.
class LastStream {
public:
    // Returns whether the stream exists as long as the process; only such a stream is stored.
    bool note(const c10::cuda::CUDAStream& stream) noexcept {
        const bool known = lasts(stream);
        handle_.store(known ? reinterpret_cast<std::uintptr_t>(stream.stream()) : nowhere);
        return known;
    }
    [[nodiscard]] std::optional<c10::cuda::CUDAStream> get(c10::DeviceIndex device) const {
        const auto handle = handle_.load();
        return handle == nowhere ? std::nullopt
                                 : std::optional(c10::cuda::getStreamFromExternal(
                                       reinterpret_cast<cudaStream_t>(handle), device));
    }

private:
    // Not null, which is the default stream's handle.
    static constexpr auto nowhere = ~std::uintptr_t{0};
    std::atomic<std::uintptr_t> handle_{nowhere};
};

// Makes a stream torch's current stream, and its device current, during its lifetime. Throws
// torch's error if the device cannot be made current.
//
// Every per-step entry point constructs one. If already current, costs two cudaGetDevice; torch's
// own guard also queries the context state.
class OnStream {
public:
    OnStream(c10::Device device, void* stream) : before_(begin(device)), stream_(before_) {
        // If the stream is current already, keep torch's object for it.
        if (const auto on = handle_of(stream); before_.stream() != on) {
            stream_ = c10::cuda::getStreamFromExternal(on, device.index());
            c10::cuda::setCurrentCUDAStream(stream_);
        }
    }
    OnStream(const OnStream&) = delete;
    OnStream& operator=(const OnStream&) = delete;
    ~OnStream() {
        try {
            c10::cuda::setCurrentCUDAStream(before_);
            if (!other_) {
                c10::cuda::set_device(before_.device_index());
            }
        } catch (...) {
            static_cast<void>(cudaGetLastError());
        }
    }

    [[nodiscard]] const c10::cuda::CUDAStream& stream() const noexcept { return stream_; }
    // Makes both current again after foreign code.
    void again() const {
        c10::cuda::set_device(stream_.device_index());
        c10::cuda::setCurrentCUDAStream(stream_);
    }

private:
    c10::cuda::CUDAStream begin(c10::Device device) {
        if (c10::cuda::current_device() != device.index()) {
            other_.emplace(device);
        }
        return c10::cuda::getCurrentCUDAStream(device.index());
    }

    std::optional<c10::cuda::CUDAGuard> other_;
    c10::cuda::CUDAStream before_;
    c10::cuda::CUDAStream stream_;
};

// Lets this thread destroy graphs, free memory and load libraries without breaking its captures on
// any device.
class Relaxed {
public:
    Relaxed() noexcept { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;
    ~Relaxed() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace vmmgraph::torch
