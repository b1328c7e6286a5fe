// Recordings on a second thread while steps go on (ExecutorOptions::record_beside).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>

#include "behind.hpp"

namespace engine_tests {
namespace {

using namespace std::chrono_literals;

ExecutorOptions beside(const std::vector<std::uint32_t>& full = {1, 2, 4, 8}) {
    auto options = behind(full);
    options.record_beside = true;
    return options;
}

// Calls of the body on threads other than the test's: recordings, and eager runs as negative sizes.
// A recording waits for open().
class HeldRecordings {
public:
    explicit HeldRecordings(Small& small, bool open = false) : open_(open) {
        small.trouble = [this](Recorder& recorder) {
            if (std::this_thread::get_id() == steps_) {
                return;
            }
            const auto size = static_cast<int>(recorder.bucket()[Axis::tokens]);
            std::unique_lock lock(mutex_);
            bodies_.push_back(recorder.recording() ? size : -size);
            inference_ = c10::InferenceMode::is_enabled();
            changed_.notify_all();
            if (recorder.recording()) {
                changed_.wait(lock, [this] { return open_; });
                if (failure_) {
                    failure_(size);
                }
            }
        };
    }
    void open() {
        const std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    void close() {
        const std::lock_guard lock(mutex_);
        open_ = false;
    }
    // Called in every recording on the thread.
    void fail_by(std::function<void(int)> failure) {
        const std::lock_guard lock(mutex_);
        failure_ = std::move(failure);
    }
    std::vector<int> take() {
        const std::lock_guard lock(mutex_);
        return std::exchange(bodies_, {});
    }
    // Calls between_steps() until a recording has begun on the thread.
    void begin_recording(Small& small) {
        for (int i = 0; i < 10'000; ++i) {
            EXPECT_GT(small.executor->between_steps(1us), 0u);
            std::unique_lock lock(mutex_);
            if (changed_.wait_for(lock, 1ms,
                                  [this] { return !bodies_.empty() && bodies_.back() > 0; })) {
                return;
            }
        }
        FAIL() << "no recording began";
    }
    [[nodiscard]] bool inference() const { return inference_; }

private:
    std::thread::id steps_ = std::this_thread::get_id();
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_;
    std::vector<int> bodies_;
    std::function<void(int)> failure_;
    bool inference_ = false;
};

TEST(Beside, StepsGoOnDuringARecordingAndItsGraphIsPublishedBetweenSteps) {
    Small small(beside());
    HeldRecordings gate(small);
    const c10::InferenceMode inference;
    for (const auto n : {4, 4, 1}) {
        EXPECT_EQ(decode(small, n), Reason::not_captured);
    }
    gate.begin_recording(small);
    EXPECT_EQ(gate.take(), (std::vector{4}));
    EXPECT_TRUE(gate.inference()) << "the thread has the settings of the steps' thread";
    for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(decode(small, 4), Reason::being_captured);
        EXPECT_EQ(decode(small, 8), Reason::not_captured);
        const auto start = std::chrono::steady_clock::now();
        EXPECT_EQ(small.executor->between_steps(1us), 2u);
        EXPECT_LT(std::chrono::steady_clock::now() - start, 5s) << "no call waits";
    }
    gate.open();
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(decode(small, 8), Reason::hit);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    EXPECT_EQ(gate.take(), (std::vector{8, 1}));
}

// A recording which fits into the slice is waited for, as with an idle engine.
TEST(Beside, ALongSliceWaitsForTheThread) {
    Small small(beside());
    HeldRecordings gate(small, true);
    for (const auto n : {8, 1, 2}) {
        decode(small, n);
    }
    EXPECT_EQ(small.executor->between_steps(10min), 0u);
    EXPECT_EQ(small.executor->stats().graphs, 3u);
    for (const auto n : {8, 1, 2}) {
        EXPECT_EQ(decode(small, n), Reason::hit);
    }
}

TEST(Beside, EagerRunsStayUnitsOfTheirOwn) {
    auto options = beside();
    options.eager_runs = 2;
    Small small(options);
    HeldRecordings gate(small, true);
    decode(small, 4);
    decode(small, 4);
    decode(small, 1);
    finish(small);
    EXPECT_EQ(gate.take(), (std::vector{-4, -4, 4, -1, -1, 1}));
}

TEST(Beside, GettersNameTheRecordedBucketOnItsThread) {
    Small small(beside());
    HeldRecordings gate(small);
    std::vector<std::int64_t> sizes;
    std::vector<std::string> refusals;
    gate.fail_by([&](int) {
        sizes = {small.inputs->tokens().size(0), small.inputs->tokens(1).size(0),
                 small.inputs->hidden_states().size(0), small.inputs->bucket()[Axis::tokens]};
        const std::vector<std::function<void()>> refused{
            [&] { static_cast<void>(small.inputs->actual(names::tokens)); },
            [&] { static_cast<void>(small.inputs->host(names::tokens)); },
            [&] { small.inputs->select(Key::of(4, 0, uniform_decode)); }};
        for (const auto& refuses : refused) {
            refusals.push_back(refusal(refuses, VMMGRAPH_ERROR_WRONG_STATE));
        }
    });
    decode(small, 4);
    gate.begin_recording(small);
    Ran ran;
    EXPECT_TRUE(small.run(11, Phase::prefill, ran));
    small.inputs->select(Key::of(8, 0, uniform_decode));
    gate.open();
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 1, 4, 4}));
    ASSERT_EQ(refusals.size(), 3u);
    for (const auto& refusal : refusals) {
        EXPECT_NE(refusal.find("records a graph while steps go on"), std::string::npos) << refusal;
    }
}

// Torch gives each of its streams to several users, so none may be the capture stream.
TEST(Beside, StepsUseAnyStreamOfTorch) {
    NEEDS_A_GPU();
    Small small(beside());
    for (const bool high_priority : {false, true}) {
        for (int i = 0; i < 32; ++i) {
            const auto any = c10::cuda::getStreamFromPool(high_priority, 0);
            Ran ran;
            EXPECT_TRUE(small.run(4, Phase::decode, ran, uniform_decode, 0, true, any.stream()));
            small.executor->between_steps(1us);
        }
    }
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Beside, ARingIsRefused) {
    auto options = beside();
    // Not used before the refusal.
    options.ring = reinterpret_cast<vmmgraph::Ring*>(&options);
    EXPECT_NE(refusal([&] { Small small(options); }).find("record_beside"), std::string::npos);
}

// The out-of-memory error of torch, as thrown for a planted lack of device memory.
[[noreturn]] void no_memory() { C10_THROW_ERROR(OutOfMemoryError, "planted"); }

TEST(Beside, AFailedRecordingLeavesItsStepsEagerAndTheOthersGoOn) {
    Small small(beside());
    HeldRecordings gate(small, true);
    gate.fail_by([](int size) {
        if (size == 4) {
            throw std::runtime_error("planted");
        }
    });
    decode(small, 4);
    decode(small, 4);
    decode(small, 1);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::capture_failed);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    EXPECT_NE(small.executor->last_failure().find("planted"), std::string::npos);
    gate.fail_by(nullptr);
    small.executor->forgive();
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Beside, AFailureIsThrownByALaterCall) {
    auto options = beside();
    options.on_failure = OnFailure::throws;
    Small small(options);
    HeldRecordings gate(small, true);
    gate.fail_by([](int) { throw std::runtime_error("planted"); });
    decode(small, 4);
    EXPECT_THROW(until(small, 0), std::runtime_error);
    EXPECT_EQ(decode(small, 4), Reason::not_captured);
    gate.fail_by(nullptr);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Beside, AFailedEagerRunOnTheThreadIsAFailedCapture) {
    auto options = beside();
    options.eager_runs = 1;
    Small small(options);
    const auto steps = std::this_thread::get_id();
    std::atomic<bool> fails{true};
    small.trouble = [&](Recorder& recorder) {
        if (fails && std::this_thread::get_id() != steps && !recorder.recording()) {
            throw std::runtime_error("planted");
        }
    };
    decode(small, 4);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::capture_failed);
    fails = false;
    small.executor->forgive();
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Beside, ARecordingWithoutMemoryIsRepeatedAfterTheCacheIsEmptied) {
    Small small(beside());
    HeldRecordings gate(small, true);
    int failures = 1;
    gate.fail_by([&](int) {
        if (failures-- > 0) {
            no_memory();
        }
    });
    decode(small, 4);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(gate.take(), (std::vector{4, 4}));
}

TEST(Beside, ARecordingWithoutMemoryEvictsALessUsedGraph) {
    auto options = beside();
    options.stand_in = 1;
    Small small(options);
    HeldRecordings gate(small, true);
    decode(small, 1);
    finish(small);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    int failures = 2;
    gate.fail_by([&](int size) {
        if (size == 1 || failures-- > 0) {
            no_memory();
        }
    });
    for (int i = 0; i < 10; ++i) {
        decode(small, 4);
    }
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(small.executor->stats().evictions, 1u);
    EXPECT_EQ(decode(small, 1), Reason::not_captured);
    finish(small);
    EXPECT_EQ(decode(small, 1), Reason::not_captured) << "left to later traffic";
    EXPECT_EQ(decode(small, 4), Reason::hit) << "used more, so not evicted for 1";
}

// clear(), warm_up() and an imposed step wait for the recording in progress.
TEST(Beside, ARecordingGivesWay) {
    Small small(beside());
    HeldRecordings gate(small);
    const auto opened_later = [&](const std::function<void()>& work) {
        decode(small, 4);
        gate.close();
        static_cast<void>(gate.take());
        gate.begin_recording(small);
        EXPECT_EQ(decode(small, 4), Reason::being_captured);
        std::thread opens([&] {
            std::this_thread::sleep_for(20ms);
            gate.open();
        });
        work();
        opens.join();
    };
    opened_later([&] { small.executor->clear(); });
    EXPECT_EQ(decode(small, 4), Reason::not_captured);
    opened_later([&] { EXPECT_EQ(small.executor->warm_up(), 4u); });
    EXPECT_EQ(decode(small, 4), Reason::hit);
    small.executor->clear();
    opened_later([&] {
        // An imposed step of a different graph, which this step captures.
        const auto tokens = at::randint(0, vocabulary, {8}, at::kLong);
        const Step step{Key::of(8, 0, uniform_decode), Phase::decode};
        auto agreed = small.executor->decide(step);
        agreed.mode = Mode::full;
        agreed.bucket = step.key;
        small.executor->prepare(step, {{names::tokens, tokens}}, agreed);
        EXPECT_EQ(small.executor->launch([] { FAIL(); }, stream()).mode, Mode::full);
        wait();
    });
    EXPECT_EQ(decode(small, 8), Reason::hit);
}

TEST(Beside, DestructionWaitsForTheRecording) {
    for (const bool fails : {false, true}) {
        Small small(beside());
        HeldRecordings gate(small);
        if (fails) {
            gate.fail_by([](int) { throw std::runtime_error("planted"); });
        }
        decode(small, 4);
        gate.begin_recording(small);
        std::atomic<bool> opened{false};
        std::thread opens([&] {
            std::this_thread::sleep_for(20ms);
            opened = true;
            gate.open();
        });
        small.executor.reset();
        EXPECT_TRUE(opened);
        opens.join();
    }
}

// Steps of all shapes while graphs are recorded, evicted and recorded again.
TEST(Beside, MovingTrafficUnderALimitIsCorrect) {
    auto options = beside({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
    options.most_graphs = 8;
    Small small(options);
    int wrong = 0;
    const int each = most_steps(6'000) / 12;
    for (int hour = 0; hour < 12; ++hour) {
        for (int i = 0; i < each; ++i) {
            Ran ran;
            wrong += !small.run(1 + (hour + i % 5) % 16, Phase::decode, ran, uniform_decode);
            small.executor->between_steps(1us);
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_LE(small.executor->stats().graphs, 8u);
    EXPECT_GT(small.executor->stats().captures, 0u);
}

TEST(Beside, TheGuardIsTakenOnTheRecordingThread) {
    auto options = beside();
    std::mutex mutex;
    const auto steps = std::this_thread::get_id();
    std::atomic<int> on_thread{0};
    options.guard = [&](Work work) -> std::shared_ptr<void> {
        on_thread += work == Work::capture && std::this_thread::get_id() != steps;
        // A lock, which its own thread must release.
        return std::make_shared<std::unique_lock<std::mutex>>(mutex);
    };
    Small small(options);
    decode(small, 4);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(on_thread, 1);
}

}  // namespace
}  // namespace engine_tests
