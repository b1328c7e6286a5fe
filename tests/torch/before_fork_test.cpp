// Installation makes no CUDA call, because CUDA in the parent breaks forked workers (vLLM).
// named_libcuda.c replaces the driver.
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime_api.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_c.h>

namespace {

bool asked() { return std::getenv("NAMED_LIBCUDA_WAS_LOADED") != nullptr; }

bool quiet(const char* what, bool done) {
    if (!done || asked()) {
        std::printf("%s %s\n", what, done ? "asked CUDA" : "failed");
        return false;
    }
    return true;
}

}  // namespace

int main() {
    bool right = quiet("loading", true);
    right = quiet("vmmgraph_torch_install()", vmmgraph_torch_install() == VMMGRAPH_OK) && right;
    right = quiet("installed()", vmmgraph_torch_installed() == 1) && right;
    right = quiet("built_for()", vmmgraph_torch_built_for() != nullptr) && right;
    right = quiet("vmmgraph_torch_uninstall()", vmmgraph_torch_uninstall() == VMMGRAPH_OK) && right;
    vmmgraph::torch::install();
    right = quiet("install()", true) && right;
    int count = 0;
    static_cast<void>(cudaGetDeviceCount(&count));
    if (!asked()) {
        std::puts("cudaGetDeviceCount() loaded no libcuda.so.1: nothing above could have failed");
        right = false;
    }
    return right ? 0 : 1;
}
