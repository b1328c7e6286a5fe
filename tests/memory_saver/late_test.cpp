// A preloaded program that loads its CUDA runtime late and privately, as Python does with torch's:
// `late_test <libcudart>`.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>

using Malloc = int (*)(void**, std::size_t);
using Free = int (*)(void*);
using Count = unsigned long (*)();

int main(int argc, char** argv) {
    const auto allocate = reinterpret_cast<Malloc>(dlsym(RTLD_DEFAULT, "cudaMalloc"));
    const auto release = reinterpret_cast<Free>(dlsym(RTLD_DEFAULT, "cudaFree"));
    if (argc != 2 || allocate == nullptr || release == nullptr) {
        return 2;
    }
    void* block = nullptr;
    if (allocate(&block, 1) != 302 || release(&block) != 302) {
        std::fputs("there is a runtime already\n", stderr);
        return 3;
    }
    void* const runtime = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    const auto count =
        runtime == nullptr ? nullptr : reinterpret_cast<Count>(dlsym(runtime, "fake_mallocs"));
    if (count == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    if (allocate(&block, 1) != 0 || count() != 1 || release(block) != 0) {
        std::fputs("the runtime that was loaded late is not found\n", stderr);
        return 5;
    }
    return 0;
}
