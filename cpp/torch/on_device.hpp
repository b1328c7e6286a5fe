// What a thread's calls of the CUDA runtime depend on: its current device and its capture mode. Also where nothing may throw.
#pragma once

#include <optional>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

// Makes a device the thread's current one while it lives; nothing for a CPU. The runtime makes a context on the current device at almost
// any call, and the default stream is that device's.
//
// Costs one cudaGetDevice where the device is current already, unlike torch's guards, which ask the driver when they go. Where the device
// cannot be made current, the driver is gone, and what is asked of it fails by itself.
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
