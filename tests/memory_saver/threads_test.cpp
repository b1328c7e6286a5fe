// Threads under LD_PRELOAD=libvmmgraph_memory_saver.so: per-thread settings and concurrent calls.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "saver.hpp"

namespace {

using saver::MiB;

class Threads : public testing::Test {
protected:
    void SetUp() override {
        ASSERT_TRUE(tms.look_up(RTLD_DEFAULT)) << "the library is not preloaded";
    }

    saver::Functions tms;
};

TEST_F(Threads, SettingsAreAThreadsOwn) {
    tms.tms_set_interesting_region(true);
    tms.tms_set_enable_cpu_backup(true);
    tms.tms_set_current_tag("of the first thread");
    std::thread([&] {
        EXPECT_FALSE(tms.tms_get_interesting_region());
        EXPECT_FALSE(tms.tms_get_enable_cpu_backup());
        EXPECT_STREQ(tms.tms_get_current_tag(), "default");
        const auto mallocs = fake_mallocs();
        void* block = nullptr;
        EXPECT_EQ(cudaMalloc(&block, MiB), 0);
        EXPECT_EQ(fake_mallocs(), mallocs + 1);
        EXPECT_EQ(cudaFree(block), 0);
        tms.tms_set_current_tag("of the second");
        tms.tms_set_current_tag(nullptr);
        EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    }).join();
    EXPECT_STREQ(tms.tms_get_current_tag(), "of the first thread");
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
    tms.tms_set_interesting_region(false);
}

// Allocation succeeds even if its tag is paused between choosing or creating a region and
// allocating in it.
TEST_F(Threads, AllocateFreePauseAndResumeAtOnce) {
    constexpr int rounds = 100;
    std::atomic<bool> stop{false};
    std::atomic<int> allocated{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            tms.tms_set_interesting_region(true);
            tms.tms_set_enable_cpu_backup(number % 2 == 0);
            tms.tms_set_current_tag(number < 2 ? "even" : "odd");
            for (int round = 0; round < rounds; ++round) {
                void* block = nullptr;
                ASSERT_EQ(cudaMalloc(&block, MiB + static_cast<std::size_t>(round)), 0);
                ++allocated;
                ASSERT_EQ(cudaFree(block), 0);
            }
        });
    }
    for (const char* const every_other : {"even", "odd"}) {
        threads.emplace_back([&, every_other] {
            for (bool one = false; !stop; one = !one) {
                const char* const tag = one ? every_other : nullptr;
                EXPECT_EQ(tms.tms_pause(tag), 0);
                EXPECT_EQ(tms.tms_resume(tag), 0);
            }
        });
    }
    for (int number = 0; number < 4; ++number) {
        threads[static_cast<std::size_t>(number)].join();
    }
    stop = true;
    threads[4].join();
    threads[5].join();
    EXPECT_EQ(allocated, 4 * rounds);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
}

}  // namespace
