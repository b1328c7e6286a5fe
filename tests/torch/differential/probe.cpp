// Tests the state after a scenario.
#include "run.hpp"

#include <chrono>
#include <thread>

#include <ATen/cuda/CUDAGeneratorImpl.h>

namespace differential {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Frees the caches of cuBLAS and torch first.
void note_left(Run& run, const std::string& key, const Before& start) {
    run.attempt(key + "what is kept is given back", [&] {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        at::cuda::clearCublasWorkspaces();
        caching::emptyCache();
        // Autograd threads release a graph slightly later.
        const auto more = [&] {
            return before().allocated > start.allocated || before().reserved > start.reserved;
        };
        for (int turn = 0; turn < 50 && more(); ++turn) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            caching::emptyCache();
        }
    });
    run.attempt(key + "statistics", [&] {
        const auto now = before();
        run.note(key + "bytes of torch's allocated", now.allocated - start.allocated);
        run.note(key + "bytes of torch's reserved", now.reserved - start.reserved);
    });
    run.attempt(key + "trim", [&] {
        run.note(key + "bytes of the arena", static_cast<std::int64_t>(run.way.held()));
    });
}

void capture_and_replay(Run& run, const std::string& key, Way& way) {
    run.tried(key, [&] {
        const auto x = run.ints({64, 64}, at::kFloat, 5);
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto stream = c10::cuda::getStreamFromPool(true);
        at::Tensor out;
        const auto graph = way.capture(stream, [&] { out = at::mm(x * 2, x) + 1; });
        graph->replay(stream);
        graph->replay(stream);
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        return out.clone();
    });
}

}  // namespace

Before before() {
    const auto stats = caching::getDeviceStats(0);
    return {stats.allocated_bytes[0].current, stats.reserved_bytes[0].current};
}

void note_memory(Run& run) {
    const auto torch = caching::getDeviceStats(0).reserved_bytes[0].peak;
    run.report.memory(static_cast<std::uint64_t>(torch) + run.way.mapped());
}

void probe(Run& run, const Before& start) {
    run.note("after: CUDA", cudaGetErrorName(cudaDeviceSynchronize()));
    run.note("after: the last error", cudaGetErrorName(cudaGetLastError()));
    run.note("after: the current stream is the default one",
             c10::cuda::getCurrentCUDAStream() == c10::cuda::getDefaultCUDAStream());
    note_left(run, "left: ", start);
    run.tried("after: eager allocations", [] {
        std::vector<at::Tensor> many;
        for (int i = 0; i < 20; ++i) {
            many.push_back(
                at::full({(1 << 18) * (i + 1)}, i, at::TensorOptions().device(at::kCUDA)));
        }
        auto sum = at::zeros({}, many[0].options().dtype(at::kDouble));
        for (const auto& one : many) {
            sum += one.sum(at::kDouble);
        }
        return sum;
    });
    run.tried("after: an eager product",
              [&] { return at::mm(run.ints({256, 256}), run.ints({256, 256}, at::kFloat, 2)); });
    run.tried("after: random numbers", [] {
        at::manual_seed(11);
        return at::rand({1000}, at::TensorOptions().device(at::kCUDA));
    });
    run.tried("after: pinned memory", [&] {
        const auto pinned = at::full({1000}, 3, at::TensorOptions().pinned_memory(true));
        return pinned.to(run.device());
    });
    run.attempt("after: empty_cache", [] { caching::emptyCache(); });
    const auto stock = make_stock();
    capture_and_replay(run, "after: a capture of torch's own", *stock);
    capture_and_replay(run, "after: a capture of the same way", run.way);
    run.tried("after: random numbers once more", [] {
        at::manual_seed(12);
        return at::rand({1000}, at::TensorOptions().device(at::kCUDA));
    });
    note_left(run, "left at last: ", start);
    run.attempt("after: uninstalled", [&] { run.way.uninstall(); });
    run.tried("after: an eager product without it",
              [&] { return at::mm(run.ints({256, 256}), run.ints({256, 256}, at::kFloat, 2)); });
    run.note("after: the last error of all", cudaGetErrorName(cudaGetLastError()));
}

}  // namespace differential
