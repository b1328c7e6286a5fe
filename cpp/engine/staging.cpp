#include "staging.hpp"

#include <cstring>
#include <optional>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "../torch/on_device.hpp"
#include "device_writes.hpp"

namespace vmmgraph::engine {

Staging::Staging(c10::Device device, std::size_t bytes) : device_(device) {
    try {
        const c10::cuda::OptionalCUDAGuard guard(device.is_cuda() ? std::optional(device)
                                                                  : std::nullopt);
        for (auto& buffer : buffers_) {
            if (!device.is_cuda()) {
                buffer.memory = new std::byte[bytes];
                buffer.on_device = buffer.memory;
                continue;
            }
            // Zero bytes would give a null pointer.
            C10_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&buffer.memory), bytes + 1,
                                         cudaHostAllocDefault));
            C10_CUDA_CHECK(cudaHostGetDevicePointer(&buffer.on_device, buffer.memory, 0));
            cudaEvent_t sent = nullptr;
            C10_CUDA_CHECK(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming));
            buffer.sent = sent;
        }
    } catch (...) {
        release();
        throw;
    }
}

Staging::~Staging() { release(); }

void Staging::release() noexcept {
    const torch::OnDevice current(device_);
    std::optional<torch::Relaxed> relaxed;
    if (device_.is_cuda()) {
        relaxed.emplace();
    }
    for (auto& buffer : buffers_) {
        if (!device_.is_cuda()) {
            delete[] buffer.memory;
            continue;
        }
        // After the driver is gone, all calls fail without harm.
        if (buffer.sent != nullptr) {
            const auto sent = static_cast<cudaEvent_t>(buffer.sent);
            C10_CUDA_IGNORE_ERROR(buffer.under_way ? cudaEventSynchronize(sent) : cudaSuccess);
            C10_CUDA_IGNORE_ERROR(cudaEventDestroy(sent));
        }
        if (buffer.memory != nullptr) {
            C10_CUDA_IGNORE_ERROR(cudaFreeHost(buffer.memory));
        }
    }
}

std::byte* Staging::write() {
    auto& buffer = buffers_[turn_];
    if (buffer.under_way) {
        const torch::OnDevice current(device_);
        const torch::Relaxed relaxed;
        C10_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(buffer.sent)));
        buffer.under_way = false;
    }
    return buffer.memory;
}

void Staging::send(void* to, std::size_t bytes, void* stream, bool by_kernel) {
    auto& buffer = buffers_[turn_];
    const auto on = static_cast<cudaStream_t>(stream);
    if (by_kernel) {
        copy_by_kernel(to, buffer.on_device, bytes, device_);
    } else if (device_.is_cuda()) {
        C10_CUDA_CHECK(cudaMemcpyAsync(to, buffer.memory, bytes, cudaMemcpyHostToDevice, on));
    } else {
        std::memcpy(to, buffer.memory, bytes);
    }
    if (device_.is_cuda()) {
        C10_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(buffer.sent), on));
        buffer.under_way = true;
    }
    turn_ = 1 - turn_;
}

}  // namespace vmmgraph::engine
