#include "collectives.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <c10/cuda/CUDAFunctions.h>
#include <cuda.h>
#include <dlfcn.h>

#include "nodes.hpp"

namespace vmmgraph::torch {
namespace {

bool registration_is_off() {
    const char* const setting = std::getenv("NCCL_GRAPH_REGISTER");
    return setting != nullptr && std::string_view(setting) == "0";
}

int devices_in_use() {
    int used = 0;
    for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
        used += c10::cuda::hasPrimaryContext(device);
    }
    return used;
}

// The driver library loaded by the CUDA runtime: only the driver API returns kernel names.
struct Driver {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    template <class F>
    F* get(const char* name) const {
        return reinterpret_cast<F*>(library == nullptr ? nullptr : dlsym(library, name));
    }
    CUresult (*const params)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*) =
        get<CUresult(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*)>("cuGraphKernelNodeGetParams_v2");
    // CUDA 12.3 and later.
    CUresult (*const function_name)(const char**, CUfunction) =
        get<CUresult(const char**, CUfunction)>("cuFuncGetName");
    CUresult (*const kernel_name)(const char**, CUkernel) =
        get<CUresult(const char**, CUkernel)>("cuKernelGetName");

    // An unreadable kernel name counts as one of NCCL.
    [[nodiscard]] bool may_be_nccls(CUgraphNode node) const {
        if (params == nullptr || function_name == nullptr || kernel_name == nullptr) {
            return true;
        }
        CUDA_KERNEL_NODE_PARAMS found{};
        const char* name = nullptr;
        if (params(node, &found) != CUDA_SUCCESS ||
            (found.func != nullptr ? function_name(&name, found.func)
                                   : kernel_name(&name, found.kern)) != CUDA_SUCCESS) {
            return true;
        }
        return name == nullptr || std::string_view(name).find("nccl") != std::string_view::npos;
    }
};

}  // namespace

bool has_registered_collectives(cudaGraph_t graph, bool shareable) {
    if (registration_is_off() || (!shareable && devices_in_use() < 2)) {
        return false;
    }
    static const Driver driver;
    const auto nodes = nodes_of(graph);
    return !nodes || std::any_of(nodes->begin(), nodes->end(), [](cudaGraphNode_t node) {
        return is(node, cudaGraphNodeTypeKernel) && driver.may_be_nccls(node);
    });
}

}  // namespace vmmgraph::torch
