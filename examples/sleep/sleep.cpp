// Generates tokens with graphs, sleeps while a second model uses the memory, wakes in two stages,
// and continues with the same tokens.
//
//   sleep [LAYERS]     layers of the model, 8; exit status 1 if a token differs
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "engine.hpp"

namespace {

using sleep_example::Engine;
using sleep_example::ModelArgs;
using Tokens = std::vector<std::vector<std::int64_t>>;

constexpr int steps = 120;
constexpr int sleeps[] = {40, 80};
constexpr auto patience = std::chrono::seconds(10);

double gib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

std::size_t free_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

const char* name(std::int32_t path) {
    switch (path) {
        case VMMGRAPH_COPY_REGISTERED:
            return "registered host memory";
        case VMMGRAPH_COPY_RING:
            return "a ring of registered buffers";
        case VMMGRAPH_COPY_PAGEABLE:
            return "pageable host memory";
        default:
            return "no copy";
    }
}

void print(const vmmgraph::PauseReport& report) {
    std::printf(
        "sleeps in %.1f ms: %.2f GiB went, %.2f copied at %.1f GiB/s (%s), %.2f on the host "
        "before; %.2f GiB free\n",
        static_cast<double>(report.micros) / 1e3, gib(report.bytes), gib(report.copied_bytes),
        report.copy_gib_per_second, name(report.path), gib(report.clean_bytes), gib(free_bytes()));
}

void print(const char* what, const vmmgraph::ResumeReport& report) {
    std::printf("  %s back in %.1f ms: %.2f GiB, %.2f copied at %.1f GiB/s\n", what,
                static_cast<double>(report.micros) / 1e3, gib(report.bytes),
                gib(report.copied_bytes), report.copy_gib_per_second);
}

// Doubles: a sleep changes the order of computation, and rounding must not change a token.
ModelArgs model(std::int64_t layers) {
    ModelArgs args;
    args.layers = layers;
    args.hidden = 2048;
    args.heads = 16;
    args.kv_heads = 4;
    args.head_dim = 128;
    args.intermediate = 5632;
    args.vocabulary = 8000;
    args.blocks = 4096;
    args.options = at::TensorOptions().dtype(at::kDouble).device(at::kCUDA);
    return args;
}

// Runs a second model with its own graphs during the sleep, and overwrites all remaining free
// memory.
void run_another(const vmmgraph::Device& device, std::size_t free_before) {
    auto args = model(4);
    args.hidden = 1024;
    Engine guest(device, args, "guest");
    c10::cuda::CUDACachingAllocator::emptyCache();
    constexpr std::size_t room = std::size_t{1} << 30;
    const auto left = free_bytes();
    const auto rest = left > 2 * room ? left - room : 0;
    const auto filled = at::full({static_cast<std::int64_t>(rest)}, 0xff,
                                 at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    std::size_t tokens = 0;
    for (int step = 0; step < 30; ++step) {
        tokens += guest.step().size();
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    std::printf(
        "  another model made %zu tokens, %zu of 30 steps by graphs; it and %.2f GiB of data had "
        "more than the %.2f GiB free before\n",
        tokens, guest.by_graphs(), gib(rest), gib(free_before));
}

int run(std::int64_t layers) {
    vmmgraph::torch::install();
    auto device = vmmgraph::Device::open();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    Engine engine(device, model(layers), "main");
    std::printf("weights %.2f GiB, cache %.2f GiB, %zu graphs over %.2f GiB; %.2f GiB free\n",
                gib(engine.weight_bytes()), gib(engine.cache_bytes()), engine.graphs(),
                gib(engine.arena_bytes()), gib(free_bytes()));
    vmmgraph::prepare_backup(device, engine.weight_bytes());

    Tokens expected;
    for (int step = 0; step < steps; ++step) {
        expected.push_back(engine.step());
    }

    engine.restart();
    std::size_t tokens = 0;
    std::size_t wrong = 0;
    for (int step = 0; step < steps; ++step) {
        for (const int sleep : sleeps) {
            if (step != sleep) {
                continue;
            }
            const auto free_before = free_bytes();
            print(engine.sleep());
            run_another(device, free_before);
            // Frees the guest's memory, which torch and the device still cache.
            c10::cuda::CUDACachingAllocator::emptyCache();
            device.trim();
            print("weights", engine.wake_weights(patience));
            print("cache", engine.wake_cache(patience));
        }
        const auto got = engine.step();
        const auto& wanted = expected[static_cast<std::size_t>(step)];
        tokens += wanted.size();
        for (std::size_t i = 0; i < wanted.size(); ++i) {
            wrong += i >= got.size() || got[i] != wanted[i];
        }
    }
    std::printf("%zu of %d steps by graphs\n%zu tokens, %zu wrong or lost\n", engine.by_graphs(),
                2 * steps, tokens, wrong);
    return tokens > 0 && wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        const auto layers = count > 1 ? std::strtol(arguments[1], nullptr, 10) : 8;
        return run(layers > 0 ? layers : 8);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
