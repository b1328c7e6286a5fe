// Several threads, and several devices.
#include <atomic>
#include <barrier>
#include <chrono>
#include <mutex>
#include <thread>

#include <c10/cuda/CUDAFunctions.h>

#include "run.hpp"

namespace differential {
namespace {

using Clock = std::chrono::steady_clock;

void two_captures_at_once_on_two_threads(Run& run) {
    // Torch's list of graphs with random numbers has no lock.
    std::mutex order;
    std::barrier both(2);
    std::vector<GraphPtr> graphs(2);
    std::vector<at::Tensor> outputs(2), inputs(2);
    const std::vector<Stream> streams{run.stream(), c10::cuda::getStreamFromPool(true)};
    inputs = {run.ints({1 << 20}), run.ints({1 << 20}, at::kFloat, 2)};
    const auto one = [&](std::size_t n) {
        try {
            std::unique_ptr<Capture> capture;
            {
                const std::lock_guard lock(order);
                capture = run.way.begin(streams[n], {});
            }
            both.arrive_and_wait();
            auto value = inputs[n] * 1;
            for (int i = 0; i < 50; ++i) {
                value = at::clamp(value * 2 - inputs[n], -100, 100);
            }
            outputs[n] = value;
            both.arrive_and_wait();
            const std::lock_guard lock(order);
            graphs[n] = capture->end();
            capture.reset();
        } catch (...) {
            run.note("a capture", describe_exception());
            both.arrive_and_drop();
        }
    };
    std::thread first(one, 0), second(one, 1);
    first.join();
    second.join();
    for (std::size_t n = 0; n < 2; ++n) {
        run.check("it was captured", graphs[n] != nullptr);
        if (graphs[n]) {
            run.replay(graphs[n]);
            run.note("out " + std::to_string(n), outputs[n]);
        }
    }
}

// Runs on its own stream until stopped.
void eager_traffic(int salt, const std::atomic<bool>& stop, std::atomic<std::int64_t>& rounds,
                   std::atomic<std::int64_t>& wrong) {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    const auto options = at::TensorOptions().dtype(at::kFloat).device(at::kCUDA);
    for (int n = 1; !stop; n = n * 5 % 251 + 1) {
        const auto a = at::full({n * 4096}, salt, options);
        const auto b = a * 2 + n;
        const auto square = at::full({64, 64}, n, options);
        const auto product = at::mm(square, square);
        b.record_stream(Run::side(salt % 3));
        wrong += b.sum(at::kDouble).item<double>() != (2.0 * salt + n) * n * 4096;
        wrong +=
            product[3][5].item<float>() != 64.0F * static_cast<float>(n) * static_cast<float>(n);
        ++rounds;
    }
}

void captures_beside_eager_traffic(Run& run) {
    std::atomic<bool> stop{false};
    std::atomic<std::int64_t> rounds{0}, wrong{0};
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::vector<std::string> thrown;
    for (int salt = 1; salt <= 4; ++salt) {
        threads.emplace_back([&, salt] {
            try {
                eager_traffic(salt, stop, rounds, wrong);
            } catch (...) {
                const std::lock_guard lock(mutex);
                thrown.push_back(describe_exception());
            }
        });
    }
    const auto x = run.ints({1 << 18});
    const auto end =
        Clock::now() + std::chrono::duration<double>(setting("VMMGRAPH_DIFFERENTIAL_SECONDS", 10));
    std::vector<GraphPtr> graphs(8);
    std::int64_t captures = 0, wrong_replays = 0;
    const bool failed = run.attempt("captures and replays", [&] {
        do {
            const auto factor = captures % 13 + 2;
            at::Tensor out;
            auto& graph = graphs[static_cast<std::size_t>(captures) % graphs.size()];
            graph = run.capture([&] {
                const auto passing = x * factor;
                out = (passing + 1) * 2 - passing;
            });
            graph->replay(run.stream());
            run.stream().synchronize();
            const c10::cuda::CUDAStreamGuard guard(run.stream());
            wrong_replays += !at::equal(out, x * factor + 2);
            ++captures;
            if (captures % 64 == 0) {
                // Torch keeps pools of destroyed graphs until emptyCache().
                c10::cuda::CUDACachingAllocator::emptyCache();
            }
        } while (Clock::now() < end);
    });
    stop = true;
    for (auto& thread : threads) {
        thread.join();
    }
    run.check("captures went through", !failed && captures > 20);
    run.note("wrong replays", wrong_replays);
    run.note("wrong eager results", wrong.load());
    run.check("there was eager work", rounds > 20);
    run.note("exceptions of eager work", thrown.empty() ? "none" : thrown.front());
}

void captures_while_another_thread_replays(Run& run) {
    auto state = run.ints({1 << 18});
    const auto x = run.ints({1 << 18}, at::kFloat, 2);
    const auto counting = run.capture([&] { state.add_(1); });
    std::atomic<bool> stop{false};
    std::int64_t replays = 0;
    std::string thrown = "none";
    std::thread other([&] {
        try {
            while (!stop) {
                counting->replay(Run::side(0));
                Run::side(0).synchronize();
                ++replays;
            }
        } catch (...) {
            thrown = describe_exception();
        }
    });
    int wrong = 0;
    run.attempt("captures", [&] {
        for (int i = 0; i < 40; ++i) {
            at::Tensor out;
            const auto graph = run.capture([&] { out = at::relu(x * (i + 1)) + i; });
            graph->replay(run.stream());
            run.stream().synchronize();
            const c10::cuda::CUDAStreamGuard guard(run.stream());
            wrong += !at::equal(out, at::relu(x * (i + 1)) + i);
        }
    });
    stop = true;
    other.join();
    run.note("wrong", wrong);
    run.note("exceptions of replays", thrown);
    run.check("each replay counted once", at::equal(state, run.ints({1 << 18}) + replays));
}

void replays_on_four_threads(Run& run) {
    std::vector<GraphPtr> graphs(4);
    std::vector<at::Tensor> states;
    for (std::size_t n = 0; n < graphs.size(); ++n) {
        states.push_back(run.ints({1 << 18}, at::kFloat, n));
        graphs[n] = run.capture([&, n] {
            const auto passing = states[n] * 2 + static_cast<std::int64_t>(n);
            states[n].copy_(at::clamp(passing, -500, 500));
        });
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<std::thread> threads;
    for (std::size_t n = 0; n < graphs.size(); ++n) {
        threads.emplace_back([&, n] {
            run.attempt("thread " + std::to_string(n), [&] {
                const auto stream = n == 3 ? run.stream() : Run::side(static_cast<int>(n));
                for (int i = 0; i < 50; ++i) {
                    graphs[n]->replay(stream);
                }
                stream.synchronize();
            });
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    for (std::size_t n = 0; n < graphs.size(); ++n) {
        run.note("state " + std::to_string(n), states[n]);
    }
}

void another_device_in_and_around_a_capture(Run& run) {
    if (c10::cuda::device_count() < 2) {
        return run.report.skip("needs two GPUs");
    }
    const auto x = run.ints({1 << 18});
    const auto there = at::TensorOptions().device(at::kCUDA, 1);
    const auto early = at::full({1 << 18}, 3, there);
    at::Tensor out, on_other;
    GraphPtr graph;
    {
        const c10::cuda::CUDAGuard guard(1);
        graph = run.capture([&] {
            out = x * 2;
            {
                const c10::cuda::CUDAGuard other(1);
                on_other = early * 2;
                static_cast<void>(at::empty({MiB}, there));
            }
            out = out + 1;
        });
        run.note("the current device", c10::cuda::current_device());
        graph->replay(run.stream());
        run.note("the current device", c10::cuda::current_device());
    }
    run.note("out", out);
    const c10::cuda::CUDAGuard guard(1);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    run.note("on the other one", on_other);
    run.note("copied", out.to(at::Device(at::kCUDA, 1)));
}

}  // namespace

std::vector<Entry> thread_scenarios() {
    return {
        {"two_captures_at_once_on_two_threads", two_captures_at_once_on_two_threads},
        {"captures_beside_eager_traffic", captures_beside_eager_traffic},
        {"captures_while_another_thread_replays", captures_while_another_thread_replays},
        {"replays_on_four_threads", replays_on_four_threads},
        {"another_device_in_and_around_a_capture", another_device_in_and_around_a_capture},
    };
}

}  // namespace differential
