// Hook mode. `hook_test <library>`: a program that opens the library, as torch does for a pluggable
// allocator, is not hooked. `hook_test`: a program with VmmGraph only keeps the runtime's
// cudaMalloc and has none of these names.
#include <vmmgraph/region.hpp>

#include <cstdio>

#include "saver.hpp"

namespace {

using saver::MiB;

int wrong = 0;

void expect(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "not so: %s\n", what);
        wrong = 1;
    }
}

void expect_the_runtimes_own() {
    void* block = nullptr;
    auto count = fake_mallocs();
    expect(cudaMalloc(&block, MiB) == 0 && fake_mallocs() == count + 1,
           "cudaMalloc is the runtime's");
    count = fake_frees();
    expect(cudaFree(block) == 0 && fake_frees() == count + 1, "cudaFree is the runtime's");
    saver::Functions none;
    none.look_up(RTLD_DEFAULT);
    expect(none.tms_pause == nullptr && none.set_memory_margin_bytes == nullptr,
           "nothing more is there for everybody");
}

void hook_mode(const char* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    saver::Functions tms;
    if (library == nullptr || !tms.look_up(library)) {
        expect(false, library == nullptr ? dlerror() : "all names");
        return;
    }
    expect_the_runtimes_own();
    const auto mallocs = fake_mallocs();
    tms.tms_set_interesting_region(true);
    tms.tms_set_enable_cpu_backup(true);
    tms.tms_set_current_tag("weights");
    void* const block = tms.tms_torch_malloc(4 * static_cast<ssize_t>(MiB), 0, nullptr);
    expect(block != nullptr && fake_mallocs() == mallocs, "memory of a region");
    void* foreign = nullptr;
    expect(cudaMalloc(&foreign, MiB) == 0 && fake_mallocs() == mallocs + 1,
           "in a region cudaMalloc is the runtime's all the same");
    if (block != nullptr) {
        saver::fill(block, 4 * MiB, 6);
        expect(tms.tms_pause("weights") == 0, "a pause");
        expect(fake_waits(0) > 0, "which has waited: the runtime is found");
        expect(tms.tms_resume("weights") == 0 && saver::holds(block, 4 * MiB, 6), "and a resume");
        // The library stays loaded while in use.
        expect(dlclose(library) == 0, "a close");
        expect(saver::holds(block, 4 * MiB, 6), "with everything alive");
        tms.tms_torch_free(block, 4 * static_cast<ssize_t>(MiB), 0, nullptr);
        expect(tms.tms_last_error(nullptr) == 0, "a free");
    }
    expect(cudaFree(foreign) == 0, "and the runtime's");
}

void regions_of_a_program() {
    const auto mallocs = fake_mallocs();
    const vmmgraph::Device device = vmmgraph::Device::open();
    vmmgraph::Region region(device, "weights", {vmmgraph::Policy::backup});
    region.free(region.allocate(MiB));
    expect(fake_mallocs() == mallocs, "VmmGraph asks no runtime");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) {
        hook_mode(argv[1]);
    } else {
        expect_the_runtimes_own();
        regions_of_a_program();
        expect_the_runtimes_own();
    }
    return wrong;
}
