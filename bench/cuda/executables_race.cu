// Reproduces a crash of the CUDA driver: concurrent cuGraphInstantiate and cuGraphExecDestroy of
// different graphs. CUDA only.
//
//   nvcc -O2 -std=c++17 -o race bench/cuda/executables_race.cu -lcuda
//   ./race unlocked 20      crashed in cuGraphExecDestroy in 1 of 4 runs (driver 580.159.04, H200,
//                           2026-11-28); variants in docs/performance.md in 3 of 4
//   ./race locked 20        one mutex around the two functions: no crash seen
//
// Measured on H200, driver 580.159.04, 2026-11-28. Four threads launch 75 graphs; 16 graphs have
// executables at a time. A mutex per graph serializes its launch, instantiation and destruction, so
// no thread uses an executable during its destruction.

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int graph_count = 75, limit = 16, thread_count = 4;

template <class Code>
void check(Code code, int line) {
    if (static_cast<int>(code) != 0) {
        std::printf("cannot go on: line %d returned CUDA error %d\n", line, static_cast<int>(code));
        std::_Exit(3);
    }
}
#define CHECK(call) check((call), __LINE__)

__global__ void add(float* data, float value, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        data[i] = data[i] * 0.5f + value;
    }
}

struct Graph {
    std::mutex mutex;
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
    const bool locked = argc > 1 && std::strcmp(argv[1], "locked") == 0;
    const double seconds = argc > 2 ? std::atof(argv[2]) : 20;
    CHECK(cudaFree(nullptr));
    float* data = nullptr;
    CHECK(cudaMalloc(&data, 1 << 24));
    cudaStream_t capture = nullptr;
    CHECK(cudaStreamCreateWithFlags(&capture, cudaStreamNonBlocking));
    std::vector<std::unique_ptr<Graph>> graphs;
    for (int g = 0; g < graph_count; ++g) {
        CHECK(cudaStreamBeginCapture(capture, cudaStreamCaptureModeThreadLocal));
        for (int k = 0; k < 10 + g; ++k) {
            add<<<1 + g * 4, 256, 0, capture>>>(data, static_cast<float>(k), 1 << 20);
        }
        graphs.push_back(std::make_unique<Graph>());
        CHECK(cudaStreamEndCapture(capture, &graphs.back()->graph));
    }

    std::mutex driver;
    std::atomic<long> instantiated{0}, launched{0};
    std::atomic<int> live{0};
    std::atomic<bool> stop{false};
    const auto alone = [&] { return locked ? std::unique_lock(driver) : std::unique_lock<std::mutex>(); };
    const auto work = [&](unsigned seed) {
        CHECK(cudaSetDevice(0));
        cudaStream_t stream = nullptr;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        std::mt19937 random(seed);
        for (long n = 0; !stop; ++n) {
            Graph& graph = *graphs[random() % graph_count];
            while (live >= limit) {
                Graph& other = *graphs[random() % graph_count];
                if (&other == &graph) {
                    continue;
                }
                const std::unique_lock own(other.mutex, std::try_to_lock);
                if (own && other.executable != nullptr) {
                    const auto held = alone();
                    CHECK(cuGraphExecDestroy(std::exchange(other.executable, nullptr)));
                    --live;
                }
            }
            const std::lock_guard own(graph.mutex);
            if (graph.executable == nullptr) {
                const auto held = alone();
                CHECK(cuGraphInstantiateWithFlags(&graph.executable, graph.graph, 1 | 8));
                ++instantiated;
                ++live;
            }
            CHECK(cuGraphLaunch(graph.executable, stream));
            ++launched;
            if (n % 256 == 0) {
                CHECK(cudaStreamSynchronize(stream));
            }
        }
        CHECK(cudaStreamSynchronize(stream));
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= thread_count; ++seed) {
        threads.emplace_back(work, seed);
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (auto& thread : threads) {
        thread.join();
    }
    std::printf("%s: %ld instantiations, %ld launches in %.0f s, no crash\n", locked ? "locked" : "unlocked", instantiated.load(),
                launched.load(), seconds);
    return 0;
}
