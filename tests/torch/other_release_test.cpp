// A library built for another torch release refuses to start: this program answers in torch's place which release it is.
#include <cstdio>
#include <string>

#include <vmmgraph/torch.hpp>

namespace at {
// Found before torch's own, since the program's symbols come first.
__attribute__((visibility("default"))) std::string show_config() {
    return "PyTorch built with:\n  - Build settings: TORCH_VERSION=1.2.3, USE_CUDA=ON";
}
}  // namespace at

int main() {
    try {
        vmmgraph::torch::install();
    } catch (const vmmgraph::Error& error) {
        const std::string text = error.what();
        std::puts(text.c_str());
        const bool both = text.find("1.2.3") != std::string::npos && text.find(vmmgraph::torch::built_for()) != std::string::npos;
        return error.status() == VMMGRAPH_ERROR_WRONG_STATE && both ? 0 : 1;
    }
    std::puts("install() did not notice the other release");
    return 1;
}
