#include "memsets.hpp"

#include <cstdint>
#include <optional>
#include <type_traits>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>

#include "nodes.hpp"

namespace vmmgraph::torch {
namespace {

template <class Add>
cudaError_t add_edges(Add add, cudaGraph_t graph, const Nodes& from, const Nodes& to) {
    if constexpr (std::is_invocable_v<Add, cudaGraph_t, const cudaGraphNode_t*,
                                      const cudaGraphNode_t*, std::nullptr_t, std::size_t>) {
        return add(graph, from.data(), to.data(), nullptr, from.size());
    } else {
        return add(graph, from.data(), to.data(), from.size());
    }
}

// A memset as a tensor and the value of its elements.
struct Fill {
    at::Tensor place;
    std::int64_t element = 0;
};

std::optional<Fill> fill_of(const cudaMemsetParams& memset, c10::Device device) {
    // Rows are not contiguous.
    if (memset.height != 1 && memset.pitch != memset.width * memset.elementSize) {
        return std::nullopt;
    }
    auto elements = static_cast<std::int64_t>(memset.width * memset.height);
    auto dtype = memset.elementSize == 4   ? at::kInt
                 : memset.elementSize == 2 ? at::kShort
                                           : at::kByte;
    auto value = memset.elementSize == 4   ? std::int64_t{static_cast<std::int32_t>(memset.value)}
                 : memset.elementSize == 2 ? std::int64_t{static_cast<std::int16_t>(memset.value)}
                                           : std::int64_t{static_cast<std::uint8_t>(memset.value)};
    if (dtype == at::kByte && elements % 4 == 0 &&
        reinterpret_cast<std::uintptr_t>(memset.dst) % 4 == 0) {
        dtype = at::kInt;
        elements /= 4;
        value = static_cast<std::int32_t>(static_cast<std::uint32_t>(value) * 0x01010101U);
    }
    if (elements == 0) {
        return std::nullopt;
    }
    return Fill{at::for_blob(memset.dst, {elements})
                    .options(at::TensorOptions().dtype(dtype).device(device))
                    .target_device(device)
                    .make_tensor(),
                value};
}

cudaGraph_t capture_fill(const Fill& fill, const c10::cuda::CUDAStream& stream) {
    if (cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        return nullptr;
    }
    try {
        fill.place.fill_(fill.element);
    } catch (...) {
        // On failure the captured graph has no node.
    }
    cudaGraph_t graph = nullptr;
    return cudaStreamEndCapture(stream.stream(), &graph) == cudaSuccess ? graph : nullptr;
}

bool replace(cudaGraph_t graph, cudaGraphNode_t memset, const c10::cuda::CUDAStream& stream) {
    cudaMemsetParams params{};
    if (cudaGraphMemsetNodeGetParams(memset, &params) != cudaSuccess) {
        return false;
    }
    const auto before = dependencies_of(memset);
    const auto behind = neighbours(&cudaGraphNodeGetDependentNodes, memset);
    const auto fill = fill_of(params, stream.device());
    if (!before || !behind || !fill) {
        return false;
    }
    const auto captured = capture_fill(*fill, stream);
    if (captured == nullptr) {
        return false;
    }
    // Destroy the captured graph last: it contains the kernel parameters.
    const auto kernels = nodes_of(captured);
    cudaKernelNodeParams kernel{};
    cudaGraphNode_t added = nullptr;
    bool done = kernels && kernels->size() == 1 && is(kernels->front(), cudaGraphNodeTypeKernel) &&
                cudaGraphKernelNodeGetParams(kernels->front(), &kernel) == cudaSuccess &&
                cudaGraphAddKernelNode(&added, graph, before->data(), before->size(), &kernel) ==
                    cudaSuccess;
    if (done && !behind->empty() &&
        add_edges(&cudaGraphAddDependencies, graph, Nodes(behind->size(), added), *behind) !=
            cudaSuccess) {
        static_cast<void>(cudaGraphDestroyNode(added));
        done = false;
    }
    if (done) {
        // Not included in the kernel parameters.
        cudaKernelNodeAttrValue priority{};
        if (cudaGraphKernelNodeGetAttribute(kernels->front(), cudaKernelNodeAttributePriority,
                                            &priority) == cudaSuccess) {
            static_cast<void>(
                cudaGraphKernelNodeSetAttribute(added, cudaKernelNodeAttributePriority, &priority));
        }
        static_cast<void>(cudaGraphDestroyNode(memset));
    }
    static_cast<void>(cudaGraphDestroy(captured));
    return done;
}

}  // namespace

std::size_t replace_memsets(cudaGraph_t graph, const c10::cuda::CUDAStream& stream) noexcept {
    std::size_t replaced = 0;
    try {
        const c10::cuda::CUDAStreamGuard guard(stream);
        for (const auto node : nodes_of(graph).value_or(Nodes())) {
            replaced += is(node, cudaGraphNodeTypeMemset) && replace(graph, node, stream) ? 1 : 0;
        }
    } catch (...) {
        // Out of host memory: the graph stays correct with memsets.
    }
    // Otherwise torch would report the error later.
    static_cast<void>(cudaGetLastError());
    return replaced;
}

}  // namespace vmmgraph::torch
