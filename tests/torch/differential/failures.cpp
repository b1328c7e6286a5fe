// Failed captures. The probe then captures again.
#include <stdexcept>

#include <c10/util/Exception.h>

#include "run.hpp"

namespace differential {
namespace {

// Ordinary work, then `body`.
void failing(Run& run, const Body& body) {
    const auto x = run.ints({1 << 18});
    at::Tensor out;
    run.attempt("the capture", [&] {
        const auto graph = run.capture([&] {
            out = at::relu(x * 2) + 1;
            body();
            out = out * 3;
        });
        run.replay(graph);
        run.note("out", out);
    });
}

void a_body_that_throws(Run& run) {
    failing(run, [] { throw std::runtime_error("planted"); });
    failing(run, [] { throw std::out_of_range("planted too"); });
}

void a_body_that_throws_a_number(Run& run) {
    failing(run, [] { throw 42; });
}

void a_body_whose_shapes_do_not_fit(Run& run) {
    failing(run, [&] {
        static_cast<void>(
            at::mm(at::empty({3, 4}, run.options()), at::empty({5, 6}, run.options())));
    });
}

void a_body_that_catches_what_it_throws(Run& run) {
    failing(run, [&] {
        run.attempt("inside", [&] {
            static_cast<void>(
                at::mm(at::empty({3, 4}, run.options()), at::empty({5, 6}, run.options())));
        });
        run.attempt("inside",
                    [&] { static_cast<void>(at::zeros({8}, run.options()).view({3, 3})); });
    });
}

void an_exception_in_backward(Run& run) {
    failing(run, [&] {
        const auto w = at::ones({64, 64}, run.options()).requires_grad_(true);
        const auto y = w * 2;
        y.register_hook([](const at::Tensor& grad) -> at::Tensor {
            if (grad.numel() == 64 * 64) {
                throw std::runtime_error("planted in a hook");
            }
            return grad;
        });
        (y * y).sum().backward();
    });
}

void an_exception_of_another_thread(Run& run) {
    failing(run, [] { elsewhere([] { throw std::logic_error("planted elsewhere"); }); });
}

void twenty_failures_and_their_tensors(Run& run) {
    const auto x = run.ints({1 << 20});
    std::vector<at::Tensor> kept;
    for (int i = 0; i < 20; ++i) {
        run.attempt("a capture", [&] {
            static_cast<void>(run.capture([&] {
                kept.push_back(x * i);
                static_cast<void>(at::mm(x.view({1024, 1024}), x.view({1024, 1024})));
                throw std::runtime_error("planted");
            }));
        });
    }
    for (int i = 0; i < 20; ++i) {
        kept[static_cast<std::size_t>(i)].fill_(i);
    }
    for (int i = 0; i < 20; i += 5) {
        run.note("kept", kept[static_cast<std::size_t>(i)]);
    }
}

// Illegal during a capture.
void an_item_in_the_body(Run& run) {
    failing(run, [&] { static_cast<void>(at::ones({}, run.options()).item<float>()); });
}

void a_copy_to_the_host_in_the_body(Run& run) {
    failing(run, [&] { static_cast<void>(at::ones({100}, run.options()).cpu()); });
}

void a_count_in_the_body(Run& run) {
    failing(run, [&] { static_cast<void>(at::nonzero(at::ones({100}, run.options()))); });
}

void a_wait_for_the_stream_in_the_body(Run& run) {
    failing(run, [&] { run.stream().synchronize(); });
}

void a_wait_for_the_device_in_the_body(Run& run) {
    failing(run, [] { C10_CUDA_CHECK(cudaDeviceSynchronize()); });
}

void a_question_to_an_event_in_the_body(Run& run) {
    failing(run, [&] {
        Event event;
        event.record(run.stream());
        C10_CUDA_CHECK(cudaEventQuery(event.get()));
    });
}

void memory_of_cuda_in_the_body(Run& run) {
    failing(run, [] {
        void* memory = nullptr;
        C10_CUDA_CHECK(cudaMalloc(&memory, 1 << 20));
        C10_CUDA_CHECK(cudaFree(memory));
    });
}

void work_on_the_default_stream_in_the_body(Run& run) {
    failing(run, [&] {
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getDefaultCUDAStream());
        static_cast<void>(at::ones({100}, run.options()));
    });
}

void a_broken_capture_that_the_body_hides(Run& run) {
    failing(run, [&] {
        static_cast<void>(cudaStreamSynchronize(run.stream().stream()));
        static_cast<void>(cudaGetLastError());
    });
}

void a_capture_on_the_default_stream(Run& run) {
    run.attempt("default: the capture", [&] {
        static_cast<void>(run.capture(c10::cuda::getDefaultCUDAStream(),
                                      [&] { static_cast<void>(at::ones({100}, run.options())); }));
    });
}

void a_capture_of_a_stream_that_is_captured(Run& run) {
    failing(run, [&] {
        run.attempt("twice: inside", [&] {
            static_cast<void>(
                run.capture([&] { static_cast<void>(at::ones({100}, run.options())); }));
        });
    });
}

void a_replay_onto_a_stream_that_is_captured(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor first, out;
    const auto graph = run.capture([&] { first = x * 2; });
    run.attempt("launch: the capture", [&] {
        const auto another = run.capture([&] {
            out = x * 3;
            run.attempt("launch: inside", [&] { graph->replay(run.stream()); });
            out = out + 1;
        });
        run.replay(another);
        run.note("launch: out", out);
    });
    run.replay(graph);
    run.note("first", first);
}

void a_graph_that_goes_in_the_body(Run& run) {
    const auto x = run.ints({1 << 18});
    at::Tensor first, out;
    auto graph = run.capture([&] { first = x * 2; });
    run.replay(graph);
    run.note("first", first);
    run.attempt("the capture", [&] {
        const auto another = run.capture([&] {
            out = x * 3;
            graph.reset();
            out = out + 1;
        });
        run.replay(another);
        run.note("out", out);
    });
}

void a_body_that_does_nothing(Run& run) {
    run.attempt("the capture", [&] {
        const auto graph = run.capture([] {});
        run.replay(graph);
        run.replay(graph);
    });
}

void a_body_that_only_allocates(Run& run) {
    at::Tensor kept;
    run.attempt("the capture", [&] {
        const auto graph = run.capture([&] {
            kept = at::empty({1 << 20}, run.options());
            static_cast<void>(at::empty({3 << 20}, run.options()));
        });
        run.replay(graph);
        kept.fill_(3);
        run.replay(graph);
    });
    run.note("kept", kept);
}

void out_of_memory_in_the_body(Run& run) {
    for (int turn = 0; turn < 2; ++turn) {
        failing(run, [&] {
            static_cast<void>(at::empty({std::int64_t{1} << 50}, run.options(at::kByte)));
        });
    }
}

void out_of_memory_that_the_body_gets_over(Run& run) {
    failing(run, [&] {
        for (auto bytes = std::int64_t{1} << 52;; bytes >>= 24) {
            at::Tensor got;
            if (!run.attempt("an allocation",
                             [&] { got = at::empty({bytes}, run.options(at::kByte)).fill_(1); })) {
                break;
            }
        }
    });
}

void more_memory_than_there_is(Run& run) {
    std::size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    failing(run, [&] {
        std::vector<at::Tensor> all;
        for (int i = 0; i < 4; ++i) {
            all.push_back(
                at::empty({static_cast<std::int64_t>(total / 3)}, run.options(at::kByte)));
        }
    });
    run.tried("an eager allocation", [&] {
        const auto half = at::empty({static_cast<std::int64_t>(free / 2)}, run.options(at::kByte));
        return half.slice(0, 0, 9).fill_(1);
    });
}

// All later calls fail.
void an_assertion_on_the_device(Run& run) {
    const auto x = run.ints({1000});
    const auto index = at::zeros({10}, run.options(at::kLong));
    at::Tensor out;
    auto graph = run.capture([&] { out = at::index(x, {index}); });
    run.replay(graph);
    run.note("out", out);
    index.fill_(100000);
    run.attempt("the replay", [&] { run.replay(graph); });
    run.attempt("another replay", [&] { run.replay(graph); });
    run.attempt("the graph goes", [&] { graph.reset(); });
    run.attempt("another capture", [&] { static_cast<void>(run.capture([&] { out = x * 2; })); });
    out = at::Tensor();
}

}  // namespace

std::vector<Entry> failure_scenarios() {
    std::vector<Entry> all{
        {"a_body_that_throws", a_body_that_throws},
        {"a_body_that_throws_a_number", a_body_that_throws_a_number},
        {"a_body_whose_shapes_do_not_fit", a_body_whose_shapes_do_not_fit},
        {"a_body_that_catches_what_it_throws", a_body_that_catches_what_it_throws},
        {"an_exception_in_backward", an_exception_in_backward},
        {"an_exception_of_another_thread", an_exception_of_another_thread},
        {"twenty_failures_and_their_tensors", twenty_failures_and_their_tensors},
        {"an_item_in_the_body", an_item_in_the_body},
        {"a_copy_to_the_host_in_the_body", a_copy_to_the_host_in_the_body},
        {"a_count_in_the_body", a_count_in_the_body},
        {"a_wait_for_the_stream_in_the_body", a_wait_for_the_stream_in_the_body},
        {"a_wait_for_the_device_in_the_body", a_wait_for_the_device_in_the_body},
        {"a_question_to_an_event_in_the_body", a_question_to_an_event_in_the_body},
        {"memory_of_cuda_in_the_body", memory_of_cuda_in_the_body},
        {"work_on_the_default_stream_in_the_body", work_on_the_default_stream_in_the_body},
        {"a_broken_capture_that_the_body_hides", a_broken_capture_that_the_body_hides},
        {"a_capture_on_the_default_stream", a_capture_on_the_default_stream},
        {"a_replay_onto_a_stream_that_is_captured", a_replay_onto_a_stream_that_is_captured},
        {"a_graph_that_goes_in_the_body", a_graph_that_goes_in_the_body},
        {"a_body_that_does_nothing", a_body_that_does_nothing},
        {"a_body_that_only_allocates", a_body_that_only_allocates},
        {"out_of_memory_in_the_body", out_of_memory_in_the_body},
        {"out_of_memory_that_the_body_gets_over", out_of_memory_that_the_body_gets_over},
    };
    Entry hungry{"more_memory_than_there_is", more_memory_than_there_is};
    hungry.alone = true;
    all.push_back(std::move(hungry));
    // Fatal under torch's own captures.
    for (auto fatal :
         {Entry{"a_capture_of_a_stream_that_is_captured", a_capture_of_a_stream_that_is_captured},
          Entry{"an_assertion_on_the_device", an_assertion_on_the_device}}) {
        fatal.ends_badly = true;
        all.push_back(std::move(fatal));
    }
    return all;
}

}  // namespace differential
