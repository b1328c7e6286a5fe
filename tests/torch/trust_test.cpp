// Very many replays, from several threads and during captures and evictions. Needs a GPU.
//
// `VMMGRAPH_TRUST_REPLAYS` (default 1,000,000) and `VMMGRAPH_TRUST_SECONDS` (captures racing
// replays, default 5) set the length.
#include "trust.hpp"

#include <atomic>
#include <future>
#include <mutex>
#include <thread>

namespace torch_tests {
namespace {

constexpr int kThreads = 4;

// Calls launch(thread, random number, stream) `launches` times from several threads and waits for
// their streams.
template <class Launch>
void from_threads(long launches, Launch launch) {
    std::vector<std::future<void>> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
        threads.push_back(std::async(std::launch::async, [=] {
            const auto stream = c10::cuda::getStreamFromPool();
            std::mt19937 random(100 + thread);
            for (long n = thread; n < launches; n += kThreads) {
                launch(thread, random(), stream.stream());
            }
            C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
        }));
    }
    for (auto& thread : threads) {
        thread.get();
    }
}

auto guarded(Fleet& fleet) {
    return [&fleet](int, std::size_t random, cudaStream_t stream) {
        fleet.graphs[random % fleet.graphs.size()].replay(stream);
    };
}

TEST_F(Trust, ReplaysOfFourThreadsAreRight) {
    SharedVmmAllocator arena;
    Fleet fleet(arena, *stream_, 65);
    ASSERT_EQ(fleet.wrong_elements(), 0);
    const long replays = setting("VMMGRAPH_TRUST_REPLAYS", 1000000);
    const auto start = Clock::now();
    from_threads(replays, guarded(fleet));
    const double seconds = since(start);
    const auto wrong = fleet.wrong_elements();
    std::printf(
        "RESULT trust: %ld replays of 65 graphs by 4 threads on 4 streams, %.0f a second, %lld "
        "wrong elements\n",
        replays, static_cast<double>(replays) / seconds, static_cast<long long>(wrong));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(fleet.wrong_graphs(), 0);
    EXPECT_EQ(fleet.spoilt_outputs(), 0);
}

// Control for the test above: the same graphs launched without the arena's guard.
TEST_F(Trust, LaunchesAroundTheGuardAreWrongAndGuardedReplaysRightAgain) {
    SharedVmmAllocator arena;
    Fleet fleet(arena, *stream_, 65);
    ASSERT_EQ(fleet.wrong_elements(), 0);
    constexpr long launches = 40000;
    // One thread per graph: CUDA graph objects are not thread-safe.
    from_threads(launches, [&](int thread, std::size_t random, cudaStream_t stream) {
        const auto first = static_cast<std::size_t>(thread);
        const auto own = (fleet.graphs.size() - first + kThreads - 1) / kThreads;
        const auto& graph = fleet.graphs[first + random % own * kThreads];
        C10_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.exec()), stream));
    });
    const auto spoilt = fleet.wrong_graphs();
    std::printf(
        "RESULT trust, unguarded: %ld launches around the guard, %lld of 65 graphs counted wrong "
        "elements\n",
        launches, static_cast<long long>(spoilt));
    EXPECT_GT(spoilt, 0) << "the graphs share nothing or never overlap: the test shows nothing";

    fleet.wrong.zero_();
    cudaDeviceSynchronize();
    for (auto& graph : fleet.graphs) {
        graph.replay(raw());
    }
    from_threads(20000, guarded(fleet));
    EXPECT_EQ(fleet.wrong_graphs(), 0);
    EXPECT_EQ(fleet.spoilt_outputs(), 0);
}

struct Guest {
    Job job;
    CapturedGraph graph;
};

TEST_F(Trust, CapturesAndEvictionsMayRaceReplays) {
    SharedVmmAllocator arena;
    Fleet fleet(arena, *stream_, 14);
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    auto wrong = at::zeros({1}, fleet.wrong.options());
    std::mutex mutex;
    std::vector<std::shared_ptr<Guest>> guests;
    std::atomic<bool> stop{false};
    std::atomic<long> replays{0};

    const auto replayer = [&](unsigned seed) {
        const auto stream = c10::cuda::getStreamFromPool();
        std::mt19937 random(seed);
        for (long n = 1; !stop; ++n) {
            std::shared_ptr<Guest> guest;
            if (random() % 2 == 0) {
                const std::lock_guard lock(mutex);
                guest = guests.empty() ? nullptr : guests[random() % guests.size()];
            }
            (guest ? guest->graph : fleet.graphs[random() % fleet.graphs.size()])
                .replay(stream.stream());
            ++replays;
            // An eviction waits for earlier launches. A device wait would break captures of other
            // threads.
            if (n % 32 == 0) {
                C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
            }
        }
        C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
    };
    std::vector<std::future<void>> threads;
    for (unsigned seed : {1u, 2u}) {
        threads.push_back(std::async(std::launch::async, replayer, seed));
    }
    // Also after an exception.
    struct Stopping {
        std::atomic<bool>& stop;
        ~Stopping() { stop = true; }
    };
    std::mt19937 random(3);
    long captures = 0, evictions = 0;
    {
        const Stopping stopping{stop};
        // Only this thread destroys graphs: torch's generator lists its graphs without a lock.
        const auto evict = [&] {
            std::shared_ptr<Guest> gone;
            {
                const std::lock_guard lock(mutex);
                auto& one = guests[random() % guests.size()];
                gone = std::move(one);
                one = std::move(guests.back());
                guests.pop_back();
            }
            while (gone.use_count() > 1) {
                std::this_thread::yield();
            }
            ++evictions;
        };
        const auto start = Clock::now();
        const double seconds = static_cast<double>(setting("VMMGRAPH_TRUST_SECONDS", 5));
        while (since(start) < seconds) {
            const auto elements = static_cast<std::int64_t>(1 + random() % (1 << 20));
            Job job{random_numbers(elements),
                    at::empty({elements}, wrong.options().dtype(at::kInt)), wrong[0],
                    1 + static_cast<int>(random() % 12), static_cast<int>(captures % 1000)};
            job.expect();
            auto graph = capture(arena, raw(), [&] {
                const auto half_way = job.check();
                if (guests.size() >= 8) {
                    evict();
                }
                static_cast<void>(job.check());
            });
            // The first replay orders all others after the work above.
            graph.replay(raw());
            {
                const std::lock_guard lock(mutex);
                guests.push_back(std::make_shared<Guest>(Guest{std::move(job), std::move(graph)}));
            }
            if (guests.size() > 12 || (guests.size() > 4 && random() % 2 == 0)) {
                evict();
            }
            if (++captures % 16 == 0) {
                arena.trim();
            }
        }
    }
    for (auto& thread : threads) {
        thread.get();
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    const auto guests_wrong = wrong.item<std::int64_t>();
    std::printf(
        "RESULT trust race: %ld captures and %ld evictions beside %ld replays, %lld wrong "
        "elements\n",
        captures, evictions, replays.load(),
        static_cast<long long>(fleet.wrong_elements() + guests_wrong));
    EXPECT_EQ(fleet.wrong_elements(), 0);
    EXPECT_EQ(guests_wrong, 0);
    EXPECT_EQ(fleet.spoilt_outputs(), 0);
    EXPECT_GT(captures, 20);
    EXPECT_GT(evictions, 10);
    EXPECT_GT(replays.load(), 100);
}

}  // namespace
}  // namespace torch_tests
