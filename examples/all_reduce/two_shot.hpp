// Two-shot all-reduce, like the custom all-reduce of SGLang and vLLM: each rank sums its share of
// all inputs, then reads the shares of the other ranks. Ranks read remote memory and write only
// their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace all_reduce_example {

// Buffers of one all-reduce by rank. Filled in after the capture, when the peers' addresses are
// known.
struct Call {
    const float* input[8];
    float* part[8];
    // Counters, initially zero, kept between replays: must not be shared memory.
    unsigned* pad[8];
};

constexpr unsigned blocks = 32, threads = 512;
constexpr std::size_t pad_bytes = blocks * 16 * sizeof(unsigned);

// Number of floats one rank sums; `count` must be a multiple of 4.
constexpr std::int64_t share_of(std::int64_t count, int ranks) {
    return (count / 4 + ranks - 1) / ranks * 4;
}

inline constexpr const char* source = R"(
struct Call {
    const float4* input[8];
    float4* part[8];
    unsigned* pad[8];
};

// Waits until this block of every rank is here. Of a rank's pad each block has 16 words: how often each rank came, and how often this one did.
__device__ void meet(const Call& call, int rank, int ranks) {
    __syncthreads();
    unsigned* const mine = call.pad[rank] + blockIdx.x * 16;
    const unsigned times = mine[8] + 1;
    if (threadIdx.x < ranks) {
        unsigned* const theirs = call.pad[threadIdx.x] + blockIdx.x * 16 + rank;
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(times) : "memory");
        unsigned seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine + threadIdx.x) : "memory");
        } while (static_cast<int>(seen - times) < 0);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mine[8] = times;
    }
}

extern "C" __global__ void two_shot(const Call* given, float4* output, long long count, int rank, int ranks) {
    const Call& call = *given;
    const long long share = (count + ranks - 1) / ranks;
    const long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    meet(call, rank, ranks);  // every input is there
    for (long long i = first; i < share && rank * share + i < count; i += step) {
        float4 sum = call.input[0][rank * share + i];
        for (int other = 1; other < ranks; ++other) {
            const float4 more = call.input[other][rank * share + i];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        call.part[rank][i] = sum;
    }
    meet(call, rank, ranks);  // every part is there, and no input is read any more
    // A block takes what the same block of the other rank made: with that one it has met.
    for (long long i = first; i < share; i += step) {
        for (int other = 0; other < ranks; ++other) {
            if (other * share + i < count) {
                output[other * share + i] = call.part[other][i];
            }
        }
    }
    meet(call, rank, ranks);  // no part is read any more: their pages are the next graph's
}
)";

template <class... Arguments>
void call(void* library, const char* name, Arguments... arguments) {
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    if (const int status =
            library == nullptr || function == nullptr ? -1 : function(arguments...)) {
        throw std::runtime_error(std::string(name) + " answered " + std::to_string(status));
    }
}

class TwoShot {
public:
    // Compiles the kernel (default or given source) for the current device. Throws on failure.
    TwoShot(int rank, int ranks, const char* code_of_kernel = source) : rank_(rank), ranks_(ranks) {
        int device = 0;
        cudaDeviceProp properties{};
        C10_CUDA_CHECK(cudaGetDevice(&device));
        C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
        const std::string architecture =
            "--gpu-architecture=sm_" + std::to_string(properties.major * 10 + properties.minor);
        const char* const options[] = {architecture.c_str()};
        auto* nvrtc = dlopen("libnvrtc.so.13", RTLD_NOW);
        nvrtc = nvrtc != nullptr ? nvrtc : dlopen("libnvrtc.so.12", RTLD_NOW);
        void* program = nullptr;
        call(nvrtc, "nvrtcCreateProgram", &program, code_of_kernel, "two_shot.cu", 0, nullptr,
             nullptr);
        call(nvrtc, "nvrtcCompileProgram", program, 1, options);
        std::size_t bytes = 0;
        call(nvrtc, "nvrtcGetCUBINSize", program, &bytes);
        std::vector<char> code(bytes);
        call(nvrtc, "nvrtcGetCUBIN", program, code.data());
        CUmodule module = nullptr;
        C10_CUDA_CHECK(cudaFree(nullptr));
        call(driver_, "cuModuleLoadData", &module, static_cast<const void*>(code.data()));
        call(driver_, "cuModuleGetFunction", &kernel_, module, "two_shot");
    }

    // Launches on the stream, captured or not. All ranks must launch equally often in the same
    // order. After completion no peer reads this rank's input or part.
    void launch(const Call* given, float* output, std::int64_t count, cudaStream_t stream) const {
        long long vectors = count / 4;
        int rank = rank_, ranks = ranks_;
        void* arguments[] = {&given, &output, &vectors, &rank, &ranks};
        call(driver_, "cuLaunchKernel", kernel_, blocks, 1U, 1U, threads, 1U, 1U, 0U,
             static_cast<CUstream>(stream), static_cast<void**>(arguments),
             static_cast<void**>(nullptr));
    }

private:
    int rank_, ranks_;
    void* driver_ = dlopen("libcuda.so.1", RTLD_NOW);
    CUfunction kernel_ = nullptr;
};

}  // namespace all_reduce_example
