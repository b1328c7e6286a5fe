// Graphs that check their results on the GPU, so replays follow each other without host waits.
#pragma once

#include "fixture.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace torch_tests {

using Trust = Torch;
using Clock = std::chrono::steady_clock;
using Stream = c10::cuda::CUDAStream;

inline double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

inline at::Tensor random_numbers(std::int64_t count) {
    return at::randint(-1000000, 1000000, {count},
                       at::TensorOptions().dtype(at::kInt).device(at::kCUDA));
}

// `steps` kernels, each over the results of the previous two. Integers, so results are exact.
inline at::Tensor chain(const at::Tensor& input, int steps, int salt) {
    at::Tensor a = input * (2 * salt + 3);
    at::Tensor b = input + salt;
    for (int step = 0; step < steps; ++step) {
        b = std::exchange(a, at::add(b, a, 2 * step + 3));
    }
    return a;
}

// Inputs and counters of a graph, outside the arena.
struct Job {
    at::Tensor input;
    at::Tensor expected;
    at::Tensor wrong;
    int steps;
    int salt;

    void expect() const { expected.copy_(chain(input, steps, salt)); }
    // Adds the mismatches to the counter on the GPU.
    at::Tensor check() const {
        auto result = chain(input, steps, salt);
        wrong.add_(at::ne(result, expected).sum());
        return result;
    }
};

// Graphs of tens of microseconds over the same pages; every thirteenth is longer.
struct Fleet {
    at::Tensor wrong;
    std::vector<Job> jobs;
    std::vector<CapturedGraph> graphs;
    // Retained outputs of every eighth graph.
    std::vector<at::Tensor> outputs;

    Fleet(SharedVmmAllocator& arena, Stream stream, int count) : outputs(count) {
        const c10::cuda::CUDAStreamGuard guard(stream);
        wrong = at::zeros({count}, at::TensorOptions().dtype(at::kLong).device(at::kCUDA));
        std::mt19937 random(65);
        for (int i = 0; i < count; ++i) {
            const bool is_long = i % 13 == 0;
            // Long graphs: 256 KiB to 1 MiB; others up to 4 MiB.
            const auto elements =
                static_cast<std::int64_t>((is_long ? 1 + random() % 4 : 1 + random() % 16) * 65536);
            const int steps = is_long ? 96 : 4 + static_cast<int>(random() % 5);
            jobs.push_back({random_numbers(elements),
                            at::empty({elements}, wrong.options().dtype(at::kInt)), wrong[i], steps,
                            i});
            jobs.back().expect();
            graphs.push_back(capture(arena, stream.stream(), [&] {
                auto result = jobs.back().check();
                if (i % 8 == 0) {
                    outputs[i] = result;
                }
            }));
            graphs.back().replay(stream.stream());
        }
        cudaDeviceSynchronize();
    }

    std::int64_t wrong_elements() const {
        cudaDeviceSynchronize();
        return wrong.sum().item<std::int64_t>();
    }
    // Counts graphs: a counter in corrupted memory may have any value.
    std::int64_t wrong_graphs() const {
        cudaDeviceSynchronize();
        return wrong.count_nonzero().item<std::int64_t>();
    }
    int spoilt_outputs() const {
        int spoilt = 0;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            spoilt += outputs[i].defined() && !at::equal(outputs[i], jobs[i].expected);
        }
        return spoilt;
    }
};

}  // namespace torch_tests
