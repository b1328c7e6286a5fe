// Calls torch and VmmGraph in one program. Returns 0 if both work and their versions match.
#include <c10/cuda/CUDAFunctions.h>
#include <cstdio>
#include <cstring>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>

int main() {
    const int devices = c10::cuda::device_count();
    std::printf("torch %s, VmmGraph %s for torch %s, %d devices\n", TORCH_VERSION,
                vmmgraph_version(), vmmgraph::torch::built_for(), devices);
    return std::strcmp(TORCH_VERSION, vmmgraph::torch::built_for()) == 0 ? 0 : 1;
}
