// With two copies of the core in a process, the libtorch component refuses to start and names both.
#include <cstdio>
#include <string>
#include <vmmgraph/torch.hpp>

extern "C" const char* plain_user_version();

int main() {
    static_cast<void>(plain_user_version());
    try {
        vmmgraph::torch::install();
    } catch (const vmmgraph::Error& error) {
        const std::string text = error.what();
        std::puts(text.c_str());
        const bool both = text.find("libvmmgraph_torch.so") != std::string::npos &&
                          text.find("libvmmgraph.so") != std::string::npos;
        return error.status() == VMMGRAPH_ERROR_WRONG_STATE && both ? 0 : 1;
    }
    std::puts("install() did not notice the second core");
    return 1;
}
