#include <vmmgraph/torch_elastic.hpp>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/torch.hpp>

#include "guards.hpp"
#include "on_device.hpp"
#include "short_of_memory.hpp"

namespace vmmgraph::torch {
namespace {

std::uint64_t bytes_of(const KvPlane& plane, std::size_t number) {
    const auto wrong = [&](const std::string& what) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot make plane " + std::to_string(number) + " of the KV cache: " + what);
    };
    std::uint64_t bytes = c10::elementSize(plane.dtype);
    for (const std::int64_t extent : plane.block) {
        if (extent <= 0) {
            wrong("an extent is " + std::to_string(extent) + "; pass extents of 1 or more");
        }
        // Only extents that would overflow are refused here. The cache checks the total.
        if (bytes > std::numeric_limits<std::uint32_t>::max() ||
            extent > std::numeric_limits<std::uint32_t>::max()) {
            wrong("a block has at least " + std::to_string(bytes) + " x " + std::to_string(extent) +
                  " bytes; pass smaller extents");
        }
        bytes *= static_cast<std::uint64_t>(extent);
    }
    return bytes;
}

KvOptions to_cache(const KvTensorOptions& options) {
    KvOptions made{{}, options.blocks_most, options.layout, options.memory};
    for (std::size_t i = 0; i < options.planes.size(); ++i) {
        made.planes.push_back(bytes_of(options.planes[i], i));
    }
    return made;
}

c10::Device place_of(const Device& device) {
    const auto info = device.info();
    return info.driver == VMMGRAPH_DRIVER_HOST
               ? c10::Device(c10::kCPU)
               : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(info.device));
}

}  // namespace

struct KvTensors::State {
    State(const Device& device, const KvTensorOptions& options)
        : place(place_of(device)), cache(device, to_cache(options)) {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    // Programs drop tensors while work still reads their bytes.
    ~State() {
        try {
            PauseFence fence;
            if (place.is_cuda()) {
                streams.push_back(nullptr);
                streams.push_back(c10::cuda::getCurrentCUDAStream(place.index()).stream());
                std::sort(streams.begin(), streams.end());
                streams.erase(std::unique(streams.begin(), streams.end()), streams.end());
                fence.streams = std::move(streams);
            }
            const OnDevice on(place);
            cache.shrink_to(0, {}, fence);
        } catch (...) {
            // Torch and the driver are shutting down. The library logged the failure.
        }
    }

    // Empties torch's cache; false on a CPU.
    bool relieve() const {
        if (!place.is_cuda()) {
            return false;
        }
        const Relaxed relaxed;
        const OnDevice on(place);
        c10::cuda::CUDACachingAllocator::emptyCache();
        return true;
    }

    void note(void* stream) {
        const std::lock_guard lock(mutex);
        if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
            streams.push_back(stream);
        }
    }

    c10::Device place;
    KvCache cache;
    std::mutex mutex;
    std::vector<void*> streams;
};

KvTensors::KvTensors(const Device& device, const KvTensorOptions& options) {
    require_release();
    state_ = std::make_shared<State>(device, options);
    const auto& place = state_->place;
    if (place.is_cuda()) {
        offer_idle_pages();
    }
    for (std::size_t i = 0; i < options.planes.size(); ++i) {
        const KvPlane& plane = options.planes[i];
        const KvPlace at = state_->cache.plane(i);
        const auto element = static_cast<std::uint64_t>(c10::elementSize(plane.dtype));
        if (at.stride_bytes % element != 0 || at.address % element != 0) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot make plane " + std::to_string(i) +
                       " of the KV cache by block: blocks are " + std::to_string(at.stride_bytes) +
                       " bytes apart, no multiple of an element's " + std::to_string(element) +
                       " bytes; order the planes by element size, or use one dtype");
        }
        std::vector<std::int64_t> sizes{static_cast<std::int64_t>(options.blocks_most)};
        sizes.insert(sizes.end(), plane.block.begin(), plane.block.end());
        std::vector<std::int64_t> strides(sizes.size(), 1);
        for (std::size_t dimension = sizes.size() - 1; dimension-- > 0;) {
            strides[dimension] = strides[dimension + 1] * sizes[dimension + 1];
        }
        strides[0] = static_cast<std::int64_t>(at.stride_bytes / element);
        // With an explicit device, torch does not query the driver about addresses without memory.
        planes_.push_back(at::from_blob(
            reinterpret_cast<void*>(at.address), sizes, strides, [owner = state_](void*) {},
            at::TensorOptions().dtype(plane.dtype).device(place), place));
    }
}

KvTensors::KvTensors(KvTensors&& other) noexcept = default;
KvTensors& KvTensors::operator=(KvTensors&& other) noexcept = default;
KvTensors::~KvTensors() = default;

const std::vector<at::Tensor>& KvTensors::planes() const noexcept { return planes_; }

KvCache& KvTensors::cache() const noexcept { return state_->cache; }

Committed KvTensors::grow_to(std::uint64_t blocks) { return commit({0, blocks}); }

Committed KvTensors::commit(BlockRange blocks) {
    std::optional<OutOfMemory> refused;
    try {
        return state_->cache.commit(blocks);
    } catch (const OutOfMemory& error) {
        refused.emplace(error);
    }
    // Emptying torch's cache does not help against a budget.
    if (refused->status() != VMMGRAPH_ERROR_OUT_OF_MEMORY || !state_->relieve()) {
        throw OutOfMemory(*refused);
    }
    return state_->cache.commit(blocks);
}

void KvTensors::before(void* stream) {
    state_->cache.before(stream);
    state_->note(stream);
}

void KvTensors::record_stream(void* stream) { state_->note(stream); }

}  // namespace vmmgraph::torch
