// Executor callbacks: hooks, guards, eager runs, failures, and memory owned by runners.
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <thread>

#include <c10/util/Exception.h>

#include "small.hpp"

namespace engine_tests {
namespace {

struct Diary {
    std::string text;
    void operator()(const std::string& entry) { text += (text.empty() ? "" : " ") + entry; }
    std::string read() { return std::exchange(text, ""); }
};

TEST(Hooks, BeforeLaunchSeesTheStepAsItWillRun) {
    auto options = both({2, 4, 8});
    Small* here = nullptr;
    Diary diary;
    options.before_launch = [&](const Key& bucket, const Step& step) {
        const auto host = here->inputs->host(names::tokens);
        EXPECT_EQ(host.size(0), bucket[Axis::tokens]);
        const auto on_device = here->inputs->tokens().cpu();
        EXPECT_TRUE(at::equal(host, on_device)) << "the copy is behind it";
        const auto of =
            step.params == nullptr ? " padding" : " of " + std::to_string(step.key[Axis::tokens]);
        diary("plan " + std::to_string(bucket[Axis::tokens]) + of);
        EXPECT_EQ(here->inputs->bucket(), bucket);
    };
    options.update = [&](const Key& bucket, const Step& step,
                         vmmgraph::torch::CapturedGraph* graph) {
        EXPECT_EQ(graph != nullptr, has_gpu());
        diary("update " + std::to_string(bucket[Axis::tokens]) + " of " +
              std::to_string(step.key[Axis::tokens]));
    };
    Small small(options);
    here = &small;
    small.trouble = [&](Recorder& recorder) {
        if (!has_gpu()) {
            EXPECT_EQ(recorder.last_kernel(), nullptr);
        }
        diary("body " + std::to_string(recorder.bucket()[Axis::tokens]));
    };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(diary.read(),
              std::string("plan 4 of 3 body 4 update 4 of 3") + (has_gpu() ? "" : " body 4"))
        << "the plan before the capture, the update before the replay, and once";
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
    EXPECT_TRUE(small.run(4, Phase::decode, ran, uniform_decode));
    diary.read();
    EXPECT_TRUE(small.run(4, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(diary.read(), std::string("plan 4 of 4 update 4 of 4") + (has_gpu() ? "" : " body 4"))
        << "before the replay";
    EXPECT_TRUE(small.run(9, Phase::mixed, ran, 5)) << "no graph of this variant";
    EXPECT_EQ(diary.read(), "") << "an eager step is the engine's";
    small.executor->warm_up();
    EXPECT_EQ(diary.read(),
              "plan 8 padding body 8 plan 64 padding body 64 plan 16 padding body 16");
}

TEST(Hooks, ThatThrowLeaveTheExecutorAsItWas) {
    auto options = both({2, 4, 8});
    bool trouble = true;
    options.before_launch = [&](const Key&, const Step&) {
        if (trouble) {
            throw std::runtime_error("no plan");
        }
    };
    Small small(options);
    Ran ran;
    EXPECT_THROW(small.run(3, Phase::decode, ran, uniform_decode), std::runtime_error);
    EXPECT_THROW(small.executor->warm_up(), std::runtime_error);
    EXPECT_NE(refusal([&] { small.executor->launch([] {}, stream()); }, VMMGRAPH_ERROR_WRONG_STATE),
              "");
    trouble = false;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured) << "the slot was given back";
    EXPECT_EQ(small.executor->warm_up(), 5u);
}

// As in xLLM: captures are exclusive, replays concurrent.
TEST(Hooks, AGuardIsHeldAsLongAsTheWork) {
    auto options = both({2, 4, 8});
    std::shared_mutex lock;
    Diary diary;
    options.guard = [&](Work work) -> std::shared_ptr<void> {
        diary(work == Work::capture ? "write" : "read");
        if (work == Work::capture) {
            return std::make_shared<std::unique_lock<std::shared_mutex>>(lock);
        }
        return std::make_shared<std::shared_lock<std::shared_mutex>>(lock);
    };
    const auto look = [&] {
        std::thread([&] {
            const bool read = lock.try_lock_shared();
            if (read) {
                lock.unlock_shared();
            }
            const bool write = lock.try_lock();
            if (write) {
                lock.unlock();
            }
            diary(write ? "free" : read ? "shared" : "alone");
        }).join();
    };
    options.before_launch = [&](const Key&, const Step&) { look(); };
    Small small(options);
    small.trouble = [&](Recorder&) { look(); };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    // A CPU replay calls the body.
    EXPECT_EQ(diary.read(), std::string("write alone alone read") + (has_gpu() ? "" : " shared"));
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(diary.read(), std::string("read shared") + (has_gpu() ? "" : " shared"));
    small.trouble = [&](Recorder&) { throw std::runtime_error("planted"); };
    small.executor->run({Key::of(2, 0, uniform_decode), Phase::decode}, {}, look, stream());
    EXPECT_EQ(diary.read(), "write alone free")
        << "an eager step has no guard, also behind a failed capture";
    EXPECT_TRUE(small.run(61, Phase::mixed, ran, 7));
    EXPECT_EQ(diary.read(), "");
}

TEST(Hooks, TheBodyRunsEagerlyBeforeItsCapture) {
    auto options = both({2, 4, 8});
    options.eager_runs = 2;
    Small small(options);
    int calls = 0;
    int runs = 0;
    small.trouble = [&](Recorder& recorder) {
        ++calls;
        EXPECT_EQ(Recorder::current(), &recorder);
        recorder.eager({}, [&](const Step&, at::TensorList) { ++runs; });
        if (has_gpu()) {
            cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
            ASSERT_EQ(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream().stream(), &status),
                      cudaSuccess);
            EXPECT_EQ(status == cudaStreamCaptureStatusNone, calls <= 2);
        }
    };
    Ran ran;
    EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.5F));
    EXPECT_EQ(calls, has_gpu() ? 3 : 4) << "two runs and the capture";
    EXPECT_EQ(runs, has_gpu() ? 3 : 4) << "two runs and the replay";
    EXPECT_TRUE(small.run(12, Phase::mixed, ran, 0, 2.5F));
    EXPECT_EQ(calls, has_gpu() ? 3 : 5);
    EXPECT_EQ(Recorder::current(), nullptr);
}

// For attention deep inside a model.
TEST(Hooks, TheRecorderIsFoundByItsThread) {
    Small small(both({2, 4, 8}));
    EXPECT_EQ(Recorder::current(), nullptr);
    std::vector<Mode> modes;
    small.trouble = [&](Recorder& recorder) {
        ASSERT_EQ(Recorder::current(), &recorder);
        modes.push_back(Recorder::current()->mode());
        std::thread([] { EXPECT_EQ(Recorder::current(), nullptr); }).join();
        if (modes.size() == 1) {
            throw std::runtime_error("planted");
        }
    };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(Recorder::current(), nullptr) << "behind a body that threw, too";
    EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.5F));
    ASSERT_GE(modes.size(), 2u);
    EXPECT_EQ(modes[0], Mode::full);
    EXPECT_EQ(modes[1], Mode::piecewise);
}

TEST(OnFailure, ThrowsInsteadOfRunningAnotherWay) {
    auto options = both({2, 4, 8});
    options.on_failure = OnFailure::throws;
    Small small(options);
    bool trouble = true;
    small.trouble = [&](Recorder& recorder) {
        if (trouble && recorder.mode() == Mode::full) {
            throw std::runtime_error("this body cannot");
        }
    };
    Ran ran;
    for (int turn = 0; turn < 2; ++turn) {
        EXPECT_THROW(small.run(3, Phase::decode, ran, uniform_decode), std::runtime_error)
            << "and not piecewise the second time";
        EXPECT_NE(small.executor->last_failure().find("this body cannot"), std::string::npos);
    }
    EXPECT_THROW(small.executor->warm_up(), std::runtime_error);
    EXPECT_EQ(small.eager_steps, 0);
    EXPECT_EQ(small.executor->stats().failures, 3u);
    trouble = false;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured);
    EXPECT_EQ(small.executor->warm_up(), 5u);
}

TEST(OnFailure, ThrowsInAWarmUpThatIsShortOfMemory) {
    for (const auto on_failure : {OnFailure::eager, OnFailure::throws}) {
        auto options = both({2, 4, 8});
        options.on_failure = on_failure;
        Small small(options);
        small.trouble = [](Recorder&) { TORCH_CHECK_WITH(OutOfMemoryError, false, "planted"); };
        if (on_failure == OnFailure::eager) {
            EXPECT_EQ(small.executor->warm_up(), 0u);
        } else {
            EXPECT_THROW(small.executor->warm_up(), c10::OutOfMemoryError);
        }
    }
}

TEST(OnFailure, WhateverABodyThrowsIsAFailedCapture) {
    Small small(both({2, 4, 8}));
    small.trouble = [](Recorder&) { throw 7; };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    small.trouble = nullptr;
    small.executor->forgive();
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured);
}

// Torch's cache is freed first, but not for a budget.
TEST(OnFailure, AGraphGoesOnlyIfMemoryOfTheDeviceIsStillShort) {
    for (const bool budget : {false, true}) {
        Small small(both({2, 4, 8}));
        Ran ran;
        EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
        int tries = 0;
        small.trouble = [&](Recorder&) {
            if (++tries == 1) {
                auto info = vmmgraph::detail::sized<vmmgraph::ErrorInfo>();
                info.status = budget ? VMMGRAPH_ERROR_OVER_BUDGET : VMMGRAPH_ERROR_OUT_OF_MEMORY;
                throw vmmgraph::OutOfMemory("planted", info);
            }
        };
        EXPECT_TRUE(small.run(4, Phase::decode, ran, uniform_decode));
        EXPECT_EQ(ran.reason, Reason::captured);
        EXPECT_EQ(small.executor->stats().evictions, budget ? 1u : 0u);
    }
}

TEST(OnFailure, TorchGivesItsCacheBackBeforeAGraphGoes) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    constexpr std::int64_t MiB = std::int64_t{1} << 20;
    Small small(both({2, 4, 8}));
    Ran ran;
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
    // Other tests' free pages would satisfy the allocation.
    static_cast<void>(vmmgraph::Device::open().trim());
    std::size_t free = 0;
    std::size_t total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    // Torch's cache holds all but 256 MiB.
    static_cast<void>(
        at::empty({static_cast<std::int64_t>(free) - 256 * MiB}, on_device(at::kByte)));
    small.trouble = [](Recorder& recorder) {
        const auto kept = at::zeros({512 * MiB}, on_device(at::kByte));
        recorder.eager({kept}, [kept](const Step&, at::TensorList) {});
    };
    EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.0F));
    EXPECT_EQ(ran.reason, Reason::captured) << small.executor->last_failure();
    EXPECT_EQ(small.executor->stats().evictions, 0u);
}

// Other memory is owned.
TEST(Runners, OwnWhatIsNotTheCaptures) {
    for (const auto route : {vmmgraph::torch::Route::blocks, vmmgraph::torch::Route::mempool}) {
        auto options = both({2, 4, 8});
        options.capture.route = route;
        Small small(options);
        const auto seen = at::zeros({3}, on_device(at::kFloat));
        std::weak_ptr<int> host_owner;
        small.trouble = [&](Recorder& recorder) {
            if (recorder.mode() != Mode::piecewise) {
                return;
            }
            // A temporary, a foreign buffer, a view, and an undefined tensor.
            auto owner = std::make_shared<int>(3);
            host_owner = owner;
            const auto other = at::from_blob(
                owner.get(), {1}, [owner](void*) {}, at::TensorOptions().dtype(at::kInt));
            owner.reset();
            recorder.eager(
                {at::full({1}, 2.0F), other, small.table.narrow(0, 1, 2), at::Tensor()},
                [seen, first = small.table[1][0].clone()](const Step&, at::TensorList tensors) {
                    ASSERT_EQ(tensors.size(), 4u);
                    EXPECT_FALSE(tensors[3].defined());
                    EXPECT_EQ(tensors[0].item<float>(), 2.0F);
                    EXPECT_EQ(tensors[1].item<int>(), 3);
                    seen.narrow(0, 0, 1).copy_(tensors[2][0].narrow(0, 0, 1));
                    seen.narrow(0, 1, 1).copy_(first.view({1}));
                });
        };
        Ran ran;
        EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.0F)) << small.executor->last_failure();
        EXPECT_EQ(ran.mode, Mode::piecewise) << small.executor->last_failure();
        EXPECT_TRUE(!has_gpu() || !host_owner.expired()) << "the graph owns it";
        // Overwrites dangling memory.
        const auto other = at::full({64}, 9.0F);
        EXPECT_TRUE(small.run(12, Phase::mixed, ran, 0, 2.0F));
        EXPECT_EQ(seen[0].item<float>(), seen[1].item<float>());
        small.executor->clear();
        EXPECT_TRUE(host_owner.expired());
        if (small.arena && route == vmmgraph::torch::Route::blocks) {
            EXPECT_EQ(small.arena->stats().spaces, 0u);
        }
    }
}

// A runner may own memory of its graph.
TEST(Runners, GoBehindTheirGraph) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    std::uint64_t spaces = 99;
    {
        Small small(both({2, 4, 8}));
        small.trouble = [&, arena = small.arena](Recorder& recorder) {
            const auto last = std::shared_ptr<int>(new int, [&spaces, arena](const int* memory) {
                spaces = arena->stats().spaces;
                delete memory;
            });
            recorder.eager({}, [last](const Step&, at::TensorList) {});
        };
        Ran ran;
        EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.0F));
        small.trouble = nullptr;
        EXPECT_EQ(spaces, 99u);
    }
    EXPECT_EQ(spaces, 0u);
}

}  // namespace
}  // namespace engine_tests
