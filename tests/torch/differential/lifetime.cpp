// Frees at different times and on different threads, with recorded streams.
#include <algorithm>

#include "run.hpp"

namespace differential {
namespace {

std::string number(std::size_t n) { return std::to_string(n); }

void eager_filling(const Run& run, int rounds = 8) {
    std::vector<at::Tensor> many;
    for (int i = 0; i < rounds; ++i) {
        many.push_back(at::full({MiB >> (i % 4)}, -1000 - i, run.options()));
    }
}

void outputs_dropped_while_their_graph_goes_on(Run& run) {
    const auto x = run.ints({512 * 1024});
    const auto sum = at::zeros({1}, run.options());
    at::Tensor out;
    const auto graph = run.capture([&] {
        out = x * 2;
        sum.add_(out.sum());
    });
    run.replay(graph);
    run.note("sum", sum);
    out = at::Tensor();
    for (int turn = 0; turn < 3; ++turn) {
        eager_filling(run);
        const auto kept = run.ints({512 * 1024}, at::kFloat, 7);
        run.replay(graph);
        run.check("an eager tensor is whole",
                  at::equal(kept, run.ints({512 * 1024}, at::kFloat, 7)));
        run.note("sum", sum);
    }
}

// On the MemPool route, valid only until another graph is replayed.
void tensors_outlive_their_graph(Run& run) {
    const auto x = run.ints({300, 300});
    at::Tensor big, small;
    {
        const auto graph = run.capture([&] {
            const auto passing = at::mm(x, x);
            big = passing * 2;
            small = passing.slice(0, 0, 1).clone();
        });
        run.replay(graph);
    }
    c10::cuda::CUDACachingAllocator::emptyCache();
    eager_filling(run);
    {
        at::Tensor other;
        const auto graph = run.capture([&] { other = at::mm(x, x) * -3; });
        run.replay(graph);
    }
    run.note("kept: big", big);
    run.note("kept: small", small);
    run.check("kept: they are right",
              at::equal(big, at::mm(x, x) * 2) && at::equal(small, at::mm(x, x).slice(0, 0, 1)));
    big.add_(1);
    run.note("kept: written afterwards", big);
}

void graphs_are_dropped_in_odd_orders(Run& run) {
    constexpr std::size_t count = 8;
    std::vector<GraphPtr> graphs(count);
    std::vector<at::Tensor> outputs(count), inputs(count);
    for (std::size_t i = 0; i < count; ++i) {
        inputs[i] = run.ints({(static_cast<std::int64_t>(i) % 3 + 1) * 100000}, at::kFloat, i + 1);
        graphs[i] = run.capture([&, i] {
            outputs[i] = (inputs[i] + 1) * static_cast<std::int64_t>(i + 2) - inputs[i].sum();
        });
    }
    for (const std::size_t gone : {3u, 0u, 7u, 6u, 1u, 5u, 2u}) {
        graphs[gone].reset();
        if (gone % 2 == 1) {
            outputs[gone] = at::Tensor();
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (graphs[i]) {
                run.replay(graphs[i]);
                run.check(number(i) + " after " + number(gone) + " went",
                          at::equal(outputs[i], (inputs[i] + 1) * static_cast<std::int64_t>(i + 2) -
                                                    inputs[i].sum()));
            }
        }
    }
    run.note("the last one", outputs[4]);
}

void a_graph_is_dropped_while_its_replay_runs(Run& run) {
    const auto x = run.ints({1024, 1024});
    at::Tensor out;
    for (int turn = 0; turn < 3; ++turn) {
        auto graph = run.capture([&] {
            out = x * (turn + 2);
            for (int i = 0; i < 50; ++i) {
                out = at::relu(out + 1) - 1;
            }
        });
        run.replay(graph);
        {
            const c10::cuda::CUDAStreamGuard guard(run.stream());
            busy(20);
        }
        graph->replay(run.stream());
        graph.reset();
        eager_filling(run);
        run.note("out", out);
        run.check("it is eager's", out.min().item<float>() >= -1);
    }
}

void many_small_graphs(Run& run) {
    constexpr int count = 120;
    std::vector<GraphPtr> graphs;
    std::vector<at::Tensor> outputs(count);
    const auto x = run.ints({256});
    for (int i = 0; i < count; ++i) {
        graphs.push_back(run.capture([&, i] { outputs[i] = (x * (i + 1) + i).cumsum(0); }));
    }
    int wrong = 0;
    for (int i = 0; i < count; ++i) {
        const int n = i * 37 % count;
        run.replay(graphs[n]);
        wrong += !at::equal(outputs[n], (x * (n + 1) + n).cumsum(0));
        if (n % 10 == 0) {
            run.note("graph " + std::to_string(n), outputs[n]);
        }
    }
    run.note("wrong", wrong);
    run.check("all are right", wrong == 0);
}

void tensors_of_the_body_are_freed_by_another_thread(Run& run) {
    const auto x = run.ints({1 << 20});
    at::Tensor out;
    const auto graph = run.capture([&] {
        auto a = x * 2;
        auto b = a + 1;
        elsewhere([gone = std::move(a)]() mutable { gone = at::Tensor(); });
        auto c = x * 5;
        auto d = c * b;
        elsewhere([&] { b = at::Tensor(), c = at::Tensor(); });
        out = x * 7 + d;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.check("it is eager's", at::equal(out, x * 7 + x * 5 * (x * 2 + 1)));
        eager_filling(run);
    }
}

void eager_tensors_are_freed_in_the_capture_by_another_thread(Run& run) {
    const auto x = run.ints({1 << 20});
    auto a = run.ints({1 << 20}, at::kFloat, 2), b = run.ints({3 << 20}, at::kFloat, 3);
    at::Tensor out, made;
    const auto graph = run.capture([&] {
        out = x * 2;
        elsewhere([&] {
            a = at::Tensor();
            made = run.ints({1 << 20}, at::kFloat, 4);
            b = at::Tensor();
        });
        out = out + x;
    });
    run.replay(graph);
    run.note("out", out);
    run.note("made", made);
}

// `when` the tensor is recorded and freed, relative to the capture.
void recorded(Run& run, const std::string& when) {
    const auto x = run.ints({1 << 20});
    for (int streams = 1; streams <= 3; ++streams) {
        auto early = run.ints({1 << 20}, at::kFloat, 8);
        std::vector<at::Tensor> read(3, at::Tensor());
        const auto read_on_sides = [&](const at::Tensor& tensor) {
            for (int n = 0; n < streams; ++n) {
                const c10::cuda::CUDAStreamGuard guard(Run::side(n));
                read[n] = tensor * (n + 2);
                tensor.record_stream(Run::side(n));
            }
        };
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        if (when == "before") {
            read_on_sides(early);
        }
        at::Tensor out;
        const auto graph = run.capture([&] {
            auto a = x * 2;
            if (when == "before") {
                early = at::Tensor();
            } else if (when == "in") {
                at::Tensor b;
                for (int n = 0; n < streams; ++n) {
                    forked(run.stream(), Run::side(n), [&] {
                        b = a + n;
                        a.record_stream(Run::side(n));
                    });
                    b.record_stream(run.stream());
                    read[n] = b * 3;
                }
            }
            out = a + 5;
            a = at::Tensor();
            out = out * (x + 1);
        });
        run.replay(graph);
        const auto name = std::to_string(streams) + " streams";
        if (when == "after") {
            read_on_sides(out);
        }
        for (int n = 0; n < streams; ++n) {
            run.note(name + ", read " + std::to_string(n), read[n]);
        }
        run.note(name + ", out", out);
        out = at::Tensor();
        read.clear();
        eager_filling(run);
        run.replay(graph);
    }
    run.tried("an eager sum", [&] { return x.sum(); });
}

void recorded_before_and_freed_in_the_capture(Run& run) { recorded(run, "before"); }
void recorded_and_freed_in_the_capture(Run& run) { recorded(run, "in"); }
void recorded_and_freed_after_the_capture(Run& run) { recorded(run, "after"); }

void used_by_the_capture_stream(Run& run, const std::function<void(const Body&)>& thread) {
    auto used = run.ints({1 << 20}, at::kFloat, 2), small = run.ints({100}, at::kFloat, 3);
    const auto x = run.ints({1 << 20});
    run.eagerly([&] {
        static_cast<void>(used * 2 + 1);
        used.record_stream(run.stream());
        small.record_stream(run.stream());
    });
    at::Tensor out;
    const auto graph = run.capture([&] {
        out = x * 2;
        thread([&] {
            used = at::Tensor();
            small = at::Tensor();
        });
        out = out + x;
        elsewhere([&] {
            for (int i = 0; i < 20; ++i) {
                static_cast<void>(at::empty({(1 << 20) + i}, run.options()));
            }
        });
    });
    for (int i = 0; i < 20; ++i) {
        run.tried("an eager allocation",
                  [&] { return at::full({(1 << 20) + i}, i, run.options()).sum(); });
    }
    run.replay(graph);
    run.note("out", out);
    at::Tensor second;
    const auto another = run.capture([&] { second = x * 3; });
    run.replay(another);
    run.note("second", second);
}

void used_by_the_capture_stream_and_freed_in_the_capture(Run& run) {
    used_by_the_capture_stream(run, [](const Body& body) { body(); });
}
void used_by_the_capture_stream_and_freed_by_another_thread(Run& run) {
    used_by_the_capture_stream(run, elsewhere);
}

void outputs_are_read_on_side_streams_and_dropped(Run& run) {
    const auto x = run.ints({4 << 20});
    at::Tensor out, sum;
    const auto graph = run.capture([&] {
        out = x * 2;
        sum = x.sum();
    });
    std::vector<at::Tensor> read;
    graph->replay(run.stream());
    Event done;
    done.record(run.stream());
    for (int n = 0; n < 3; ++n) {
        done.hold_back(Run::side(n));
        const c10::cuda::CUDAStreamGuard guard(Run::side(n));
        busy(10);
        read.push_back(out + n);
        out.record_stream(Run::side(n));
    }
    out = at::Tensor();
    eager_filling(run);
    at::Tensor other;
    const auto next = run.capture([&] { other = at::full({4 << 20}, -9, run.options()) * x; });
    next->replay(run.stream());
    for (int n = 0; n < 3; ++n) {
        run.note("read: " + std::to_string(n), read[n]);
        run.check("read: it is right", at::equal(read[n], x * 2 + n));
    }
    run.check("the other one too", at::equal(other, x * -9));
}

// Not guaranteed on the MemPool route, where the graphs share memory.
void one_graph_reads_what_another_one_made(Run& run) {
    const auto x = run.ints({1 << 20});
    at::Tensor first_out, out;
    const auto first = run.capture([&] { first_out = x * 2; });
    const auto second = run.capture([&] {
        std::vector<at::Tensor> filling;
        for (int i = 0; i < 4; ++i) {
            filling.push_back(at::full({1 << 20}, 99, run.options()));
        }
        out = first_out + 1;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(first);
        run.replay(second);
        run.note("out", out);
    }
}

void what_cublas_keeps_does_not_hold_a_graphs_memory(Run& run) {
    const auto x = run.reals({2048, 2048}, at::kBFloat16);
    for (int shape = 1; shape <= 4; ++shape) {
        const auto graph = run.capture([&] {
            auto y = x.slice(0, 0, shape * 512);
            for (int i = 0; i < 4; ++i) {
                y = at::mm(y, x) * 0.01 + y;
            }
            static_cast<void>(at::empty({512 * MiB}, run.options(at::kByte)).fill_(shape));
        });
        run.replay(graph);
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    c10::cuda::CUDACachingAllocator::emptyCache();
    run.check("at most 100 MiB of the arena stay",
              run.way.held() < static_cast<std::size_t>(100 * MiB));
    run.check("at most 100 MiB of torch's stay", before().reserved < 100 * MiB);
}

}  // namespace

std::vector<Entry> lifetime_scenarios() {
    return {
        {"outputs_dropped_while_their_graph_goes_on", outputs_dropped_while_their_graph_goes_on},
        {"tensors_outlive_their_graph", tensors_outlive_their_graph},
        {"graphs_are_dropped_in_odd_orders", graphs_are_dropped_in_odd_orders, false, true},
        {"a_graph_is_dropped_while_its_replay_runs", a_graph_is_dropped_while_its_replay_runs},
        {"many_small_graphs", many_small_graphs, false, true},
        {"tensors_of_the_body_are_freed_by_another_thread",
         tensors_of_the_body_are_freed_by_another_thread, false, true},
        {"eager_tensors_are_freed_in_the_capture_by_another_thread",
         eager_tensors_are_freed_in_the_capture_by_another_thread},
        {"recorded_before_and_freed_in_the_capture", recorded_before_and_freed_in_the_capture},
        {"recorded_and_freed_in_the_capture", recorded_and_freed_in_the_capture},
        {"recorded_and_freed_after_the_capture", recorded_and_freed_after_the_capture},
        {"used_by_the_capture_stream_and_freed_in_the_capture",
         used_by_the_capture_stream_and_freed_in_the_capture},
        {"used_by_the_capture_stream_and_freed_by_another_thread",
         used_by_the_capture_stream_and_freed_by_another_thread},
        {"outputs_are_read_on_side_streams_and_dropped",
         outputs_are_read_on_side_streams_and_dropped},
        {"one_graph_reads_what_another_one_made", one_graph_reads_what_another_one_made},
        {"what_cublas_keeps_does_not_hold_a_graphs_memory",
         what_cublas_keeps_does_not_hold_a_graphs_memory},
    };
}

}  // namespace differential
