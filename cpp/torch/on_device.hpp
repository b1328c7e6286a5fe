// What a thread's calls of the CUDA runtime and of torch depend on: its current device, torch's current stream, its capture mode, and
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

// Makes a device the thread's current one while it lives; nothing for a CPU. The runtime makes a context on the current device at almost
// any call, and the default stream is that device's.
//
// Costs one cudaGetDevice where the device is current already, unlike torch's guards, which ask the driver when they go. Never throws: where
// the device cannot be made current, the driver is gone, and what is asked of it fails by itself.
class OnDevice {
public:
    explicit OnDevice(c10::Device device) noexcept {
        int current = -1;
        if (!device.is_cuda() || (cudaGetDevice(&current) == cudaSuccess && current == device.index())) {
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

// Whether a stream is under capture, also if the capture is broken. The default stream is not while others are.
inline bool is_capturing(cudaStream_t stream) noexcept {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
        return status != cudaStreamCaptureStatusNone;
    }
    // Torch checks for errors at its next launch.
    static_cast<void>(cudaGetLastError());
    return false;
}

// The handle that torch knows a caller's stream by. It has no name for the legacy default stream's second one, cudaStreamLegacy: its number is
// odd, as those of torch's own streams are, and torch throws where it is used.
inline cudaStream_t handle_of(void* stream) noexcept {
    const auto handle = static_cast<cudaStream_t>(stream);
    return handle == cudaStreamLegacy ? nullptr : handle;
}

// Whether a stream is there as long as the process: one of torch's pools or the default one. Torch names others by their handles.
inline bool lasts(const c10::cuda::CUDAStream& stream) noexcept {
    try {
        return stream.id() == 0 || stream.id() != static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(stream.stream()));
    } catch (...) {
        // None that torch knows.
        return false;
    }
}

// Where something was launched last. Any thread.
class LastStream {
public:
    // Whether that one lasts: nothing is known of others.
    bool note(const c10::cuda::CUDAStream& stream) noexcept {
        const bool known = lasts(stream);
        handle_.store(known ? reinterpret_cast<std::uintptr_t>(stream.stream()) : nowhere);
        return known;
    }
    [[nodiscard]] std::optional<c10::cuda::CUDAStream> get(c10::DeviceIndex device) const {
        const auto handle = handle_.load();
        return handle == nowhere ? std::nullopt
                                 : std::optional(c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle), device));
    }

private:
    // The default stream's handle is null.
    static constexpr auto nowhere = ~std::uintptr_t{0};
    std::atomic<std::uintptr_t> handle_{nowhere};
};

// Makes a stream torch's current one, and its device the thread's, while it lives; afterwards both are again what they were, whatever ran
// meanwhile. Throws what torch throws of a device that cannot be made current.
//
// One stands at the top of whatever is called for every step, and what is called below it relies on it. Where device and stream are
// current already it costs one cudaGetDevice at its beginning and one at its end; torch's own guard asks the driver for the state of a
// context besides.
class OnStream {
public:
    OnStream(c10::Device device, void* stream) : before_(begin(device)), stream_(before_) {
        // By the name that torch has for it, if it is the current one already.
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
            // If another device was current, torch's guard goes back to that one.
            if (!other_) {
                c10::cuda::set_device(before_.device_index());
            }
        } catch (...) {
            static_cast<void>(cudaGetLastError());
        }
    }

    // As torch has it.
    [[nodiscard]] const c10::cuda::CUDAStream& stream() const noexcept { return stream_; }
    // Makes both current again, where somebody else's code may have left others.
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

// Lets this thread destroy graphs, free memory and start libraries while it captures, on this device or another, which would break that
// capture otherwise. Asks for nothing that can fail but in a driver that is gone.
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
