// Streams, events and guards in and around captures.
#include <atomic>

#include "run.hpp"

namespace differential {
namespace {

const auto on_device = at::TensorOptions().device(at::kCUDA);

void nested_stream_guards(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor out, a, b;
    const auto graph = run.capture([&] {
        const c10::cuda::CUDAStreamGuard same(run.stream());
        a = x * 2;
        forked(run.stream(), Run::side(0), [&] {
            b = a + 1;
            forked(Run::side(0), Run::side(1), [&] {
                const c10::cuda::CUDAStreamGuard back(run.stream());
                a = a * 3;
            });
            b = b * 2;
        });
        run.note("the current stream is the captured one",
                 c10::cuda::getCurrentCUDAStream() == run.stream());
        out = a + b;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.check("it is eager's", at::equal(out, x * 6 + (x * 2 + 1) * 2));
    }
}

void side_streams_are_forked_and_joined(Run& run) {
    const auto x = run.ints({1 << 20});
    at::Tensor out;
    std::vector<at::Tensor> parts(3);
    const auto graph = run.capture([&] {
        const auto base = x + 1;
        Event start;
        start.record(run.stream());
        for (int n = 0; n < 3; ++n) {
            start.hold_back(Run::side(n));
            const c10::cuda::CUDAStreamGuard guard(Run::side(n));
            auto passing = base * (n + 2);
            parts[n] = passing - x;
            passing = at::Tensor();
            parts[n] = parts[n] * 2;
            Event done;
            done.record(Run::side(n));
            done.hold_back(run.stream());
        }
        out = parts[0] + parts[1] + parts[2];
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.note("a part", parts[2]);
    }
    run.check("it is eager's", at::equal(out, ((x + 1) * 9 - x * 3) * 2));
}

void a_side_stream_that_is_not_joined(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor out;
    run.attempt("the capture", [&] {
        static_cast<void>(run.capture([&] {
            Event fork;
            fork.record(run.stream());
            fork.hold_back(Run::side(0));
            const c10::cuda::CUDAStreamGuard guard(Run::side(0));
            out = x * 2;
        }));
    });
    out = at::Tensor();
}

void an_event_recorded_before_is_waited_for_in_the_body(Run& run) {
    const auto x = run.ints({1 << 18});
    Event before_it;
    before_it.record(Run::side(0));
    at::Tensor out;
    run.attempt("the capture", [&] {
        const auto graph = run.capture([&] {
            out = x * 2;
            const auto code = cudaStreamWaitEvent(run.stream().stream(), before_it.get(), 0);
            run.note("what CUDA says", cudaGetErrorName(code));
            static_cast<void>(cudaGetLastError());
        });
        run.replay(graph);
        run.note("out", out);
    });
}

void an_event_of_a_graph_is_waited_for_outside(Run& run) {
    const auto x = run.ints({1 << 20});
    Event inside;
    at::Tensor out, late;
    const auto graph = run.capture([&] {
        out = x * 2;
        C10_CUDA_CHECK(
            cudaEventRecordWithFlags(inside.get(), run.stream().stream(), cudaEventRecordExternal));
        late = out + 1;
    });
    for (int turn = 0; turn < 3; ++turn) {
        graph->replay(run.stream());
        inside.hold_back(Run::side(0));
        at::Tensor read;
        {
            const c10::cuda::CUDAStreamGuard guard(Run::side(0));
            read = out * 5;
        }
        run.note("read", read);
    }
    run.note("late", late);
}

void an_event_of_outside_is_waited_for_by_a_graph(Run& run) {
    auto x = run.ints({1 << 20});
    const auto y = run.ints({1 << 20}, at::kFloat, 2);
    Event given;
    at::Tensor out;
    given.record(Run::side(0));
    const auto graph = run.capture([&] {
        C10_CUDA_CHECK(
            cudaStreamWaitEvent(run.stream().stream(), given.get(), cudaEventWaitExternal));
        out = x * 2;
    });
    for (int turn = 0; turn < 3; ++turn) {
        {
            const c10::cuda::CUDAStreamGuard guard(Run::side(0));
            busy(10);
            x.add_(y);
            given.record(Run::side(0));
        }
        graph->replay(run.stream());
        run.note("out", out);
    }
}

void replays_on_other_streams(Run& run) {
    auto state = run.ints({1 << 18});
    at::Tensor out;
    const auto graph = run.capture([&] {
        state.add_(1);
        out = state * 2;
    });
    const std::vector<Stream> streams{Run::side(0), run.stream(), Run::side(1),
                                      c10::cuda::getDefaultCUDAStream(), Run::side(2)};
    for (const auto& stream : streams) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        graph->replay(stream);
        run.note("out", out);
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    Event done;
    for (int turn = 0; turn < 40; ++turn) {
        const auto& stream = streams[static_cast<std::size_t>(turn) % streams.size()];
        if (turn > 0) {
            done.hold_back(stream);
        }
        graph->replay(stream);
        done.record(stream);
    }
    run.note("state", state);
    run.check("each counted once", at::equal(state, run.ints({1 << 18}) + 45));
}

void a_stream_whose_handle_came_back(Run& run) {
    const auto x = run.ints({1 << 18});
    std::vector<GraphPtr> graphs;
    std::vector<at::Tensor> outputs(4);
    for (std::size_t turn = 0; turn < outputs.size(); ++turn) {
        cudaStream_t raw = nullptr;
        C10_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
        const auto stream = c10::cuda::getStreamFromExternal(raw, 0);
        const auto factor = static_cast<std::int64_t>(turn + 2);
        graphs.push_back(
            run.capture(stream, [&, factor] { outputs[turn] = at::relu(x * factor) + 1; }));
        run.replay(graphs.back());
        run.note("out", outputs[turn]);
        C10_CUDA_CHECK(cudaStreamDestroy(raw));
        run.replay(graphs.front());
        run.note("the first graph's", outputs[0]);
    }
}

void a_stream_that_goes_after_a_replay_on_it(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor out, next;
    const auto graph = run.capture([&] { out = x * 3; });
    cudaStream_t raw = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    graph->replay(c10::cuda::getStreamFromExternal(raw, 0));
    run.note("out", out);
    C10_CUDA_CHECK(cudaStreamDestroy(raw));
    run.replay(graph);
    run.note("out once more", out);
    const auto another = run.capture([&] { next = x * 4; });
    run.replay(another);
    run.note("next", next);
}

void a_body_that_leaves_another_stream_behind(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor out;
    run.attempt("stream: the capture", [&] {
        const auto graph = run.capture([&] {
            out = x * 2;
            c10::cuda::setCurrentCUDAStream(Run::side(0));
        });
        run.replay(graph);
        run.note("stream: out", out);
    });
}

void host_functions_in_a_graph(Run& run) {
    const auto x = run.ints({1 << 18});
    std::atomic<int> calls{0};
    at::Tensor out;
    const auto graph = run.capture([&] {
        out = x * 2;
        const auto call = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
        C10_CUDA_CHECK(cudaLaunchHostFunc(run.stream().stream(), call, &calls));
        out = out + 1;
        C10_CUDA_CHECK(cudaLaunchHostFunc(run.stream().stream(), call, &calls));
    });
    run.note("calls by the capture", calls.load());
    for (int turn = 0; turn < 5; ++turn) {
        run.replay(graph);
    }
    run.note("calls by replays", calls.load());
    run.note("out", out);
}

void pinned_memory_in_copies_of_a_graph(Run& run) {
    auto in = at::zeros({1 << 16}, at::TensorOptions().pinned_memory(true)),
         back = at::zeros_like(in).pin_memory();
    auto device = at::zeros({1 << 16}, on_device);
    const auto graph = run.capture([&] {
        device.copy_(in, true);
        const auto result = device * 2 + 1;
        back.copy_(result, true);
    });
    for (int turn = 0; turn < 3; ++turn) {
        in.fill_(turn + 3);
        run.replay(graph);
        run.note("device", device);
        run.note("back", back);
        run.check("it went there and back",
                  back[7].item<float>() == static_cast<float>(2 * (turn + 3) + 1));
    }
}

void pinned_memory_made_and_freed_in_the_body(Run& run) {
    const auto x = run.ints({1 << 16});
    run.attempt("the capture", [&] {
        at::Tensor kept, out;
        const auto graph = run.capture([&] {
            kept = at::empty({1 << 16}, at::TensorOptions().pinned_memory(true));
            kept.copy_(x * 2, true);
            const auto passing = at::full({1 << 16}, 5, at::TensorOptions().pinned_memory(true));
            out = passing.to(run.device(), true) + x;
        });
        run.replay(graph);
        run.note("kept", kept);
        run.note("out's size", out.numel());
    });
    run.note("another one", at::full({1 << 16}, 9, at::TensorOptions().pinned_memory(true)));
}

void launches_without_torch(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor a, b;
    const auto graph = run.capture([&] {
        a = at::empty({1 << 18}, on_device);
        b = at::empty({1 << 18}, on_device);
        auto* const stream = run.stream().stream();
        C10_CUDA_CHECK(cudaMemcpyAsync(a.data_ptr(), x.data_ptr(), x.nbytes(),
                                       cudaMemcpyDeviceToDevice, stream));
        C10_CUDA_CHECK(cudaMemsetAsync(b.data_ptr(), 0, b.nbytes(), stream));
        C10_CUDA_CHECK(cudaMemset2DAsync(b.data_ptr(), 1024, 0x3f, 512, 16, stream));
        C10_CUDA_CHECK(cudaMemcpy2DAsync(b.data_ptr<float>() + 65536, 2048, x.data_ptr(), 1024,
                                         1024, 32, cudaMemcpyDeviceToDevice, stream));
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("a", a);
        run.note("b", b);
    }
}

void asked_while_it_captures(Run& run) {
    const auto x = run.ints({1 << 10});
    at::Tensor out;
    const auto graph = run.capture([&] {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        C10_CUDA_CHECK(cudaStreamIsCapturing(run.stream().stream(), &status));
        run.note("the stream", status);
        C10_CUDA_CHECK(cudaStreamIsCapturing(Run::side(0).stream(), &status));
        run.note("a side stream", status);
        run.note("the device", c10::cuda::current_device());
        run.note("the current stream is the one given",
                 c10::cuda::getCurrentCUDAStream() == run.stream());
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
        run.note("the thread's mode", mode);
        C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
        out = x * 2;
    });
    run.replay(graph);
    run.note("out", out);
}

}  // namespace

std::vector<Entry> stream_scenarios() {
    return {
        {"nested_stream_guards", nested_stream_guards},
        {"side_streams_are_forked_and_joined", side_streams_are_forked_and_joined},
        {"a_side_stream_that_is_not_joined", a_side_stream_that_is_not_joined},
        {"an_event_recorded_before_is_waited_for_in_the_body",
         an_event_recorded_before_is_waited_for_in_the_body},
        {"an_event_of_a_graph_is_waited_for_outside", an_event_of_a_graph_is_waited_for_outside},
        {"an_event_of_outside_is_waited_for_by_a_graph",
         an_event_of_outside_is_waited_for_by_a_graph},
        {"replays_on_other_streams", replays_on_other_streams},
        {"a_stream_whose_handle_came_back", a_stream_whose_handle_came_back},
        {"a_stream_that_goes_after_a_replay_on_it", a_stream_that_goes_after_a_replay_on_it},
        {"a_body_that_leaves_another_stream_behind", a_body_that_leaves_another_stream_behind},
        {"host_functions_in_a_graph", host_functions_in_a_graph},
        {"pinned_memory_in_copies_of_a_graph", pinned_memory_in_copies_of_a_graph},
        {"pinned_memory_made_and_freed_in_the_body", pinned_memory_made_and_freed_in_the_body},
        {"launches_without_torch", launches_without_torch},
        {"asked_while_it_captures", asked_while_it_captures},
    };
}

}  // namespace differential
