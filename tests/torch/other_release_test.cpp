// Reports another torch release in torch's place; the library must refuse to start.
#include <cstdio>
#include <map>
#include <string>

#include <vmmgraph/torch.hpp>

namespace caffe2 {
// Found before torch's own symbol: the program is searched first.
__attribute__((visibility("default"))) const std::map<std::string, std::string>& GetBuildOptions() {
    static const std::map<std::string, std::string> settings{{"TORCH_VERSION", "1.2.3"},
                                                             {"USE_CUDA", "ON"}};
    return settings;
}
}  // namespace caffe2

int main() {
    try {
        vmmgraph::torch::install();
    } catch (const vmmgraph::Error& error) {
        const std::string text = error.what();
        std::puts(text.c_str());
        const bool both = text.find("1.2.3") != std::string::npos &&
                          text.find(vmmgraph::torch::built_for()) != std::string::npos;
        return error.status() == VMMGRAPH_ERROR_WRONG_STATE && both ? 0 : 1;
    }
    std::puts("install() did not notice the other release");
    return 1;
}
