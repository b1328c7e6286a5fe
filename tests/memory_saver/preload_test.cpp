// A program under LD_PRELOAD=libvmmgraph_memory_saver.so, with the fake CUDA runtime and the host
// driver: each function, and each misuse.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.hpp>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "saver.hpp"

namespace {

using saver::fill;
using saver::holds;
using saver::MiB;

class Preload : public testing::Test {
protected:
    void SetUp() override {
        ASSERT_TRUE(tms.look_up(RTLD_DEFAULT)) << "the library is not preloaded";
        for (int device : {0, 1}) {
            devices.push_back(vmmgraph::Device::open({vmmgraph::DriverChoice::automatic, device}));
        }
        static int number = 0;
        tag = "tag " + std::to_string(++number);
        tms.tms_set_current_tag(tag.c_str());
        tms.tms_last_error(nullptr);
        static_cast<void>(cudaGetLastError());
    }

    void TearDown() override {
        fake_set_capture(0);
        fake_set_free_bytes(std::size_t{1} << 40);
        tms.set_memory_margin_bytes(0);
        tms.tms_set_retain_cpu_backup(false);
        tms.tms_set_interesting_region(false);
        tms.tms_set_enable_cpu_backup(false);
        static_cast<void>(cudaSetDevice(0));
        for (auto& device : devices) {
            device.set_budget(0);
        }
        EXPECT_EQ(tms.tms_resume(nullptr), 0);
    }

    void* allocate(std::size_t bytes, bool backup = true) {
        tms.tms_set_interesting_region(true);
        tms.tms_set_enable_cpu_backup(backup);
        void* block = nullptr;
        EXPECT_EQ(cudaMalloc(&block, bytes), 0);
        tms.tms_set_interesting_region(false);
        EXPECT_NE(block, nullptr);
        return block;
    }

    std::uint64_t physical(int device = 0) {
        return devices[static_cast<std::size_t>(device)].stats().physical_bytes;
    }

    static int current() {
        int device = -1;
        EXPECT_EQ(cudaGetDevice(&device), 0);
        return device;
    }

    std::string last_words() {
        const char* text = nullptr;
        tms.tms_last_error(&text);
        return text;
    }

    saver::Functions tms;
    std::vector<vmmgraph::Device> devices;
    std::string tag;
};

TEST_F(Preload, OutsideARegionTheRuntimeAnswers) {
    const auto mallocs = fake_mallocs();
    const auto frees = fake_frees();
    void* block = nullptr;
    ASSERT_EQ(cudaMalloc(&block, MiB), 0);
    EXPECT_EQ(fake_mallocs(), mallocs + 1);
    EXPECT_EQ(cudaFree(block), 0);
    EXPECT_EQ(fake_frees(), frees + 1);
}

TEST_F(Preload, NullZeroBytesAndForeignPointersAreTheRuntimes) {
    tms.tms_set_interesting_region(true);
    EXPECT_EQ(cudaMalloc(nullptr, MiB), 1);
    EXPECT_EQ(cudaGetLastError(), 1);
    void* block = &block;
    EXPECT_EQ(cudaMalloc(&block, 0), 0);
    EXPECT_EQ(block, nullptr);
    EXPECT_EQ(cudaFree(nullptr), 0);
    int foreign = 0;
    EXPECT_EQ(cudaFree(&foreign), 1);
    EXPECT_EQ(cudaGetLastError(), 1);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0) << "none of these is a failure of ours";
}

TEST_F(Preload, MemoryStepsAsideAndComesBackWithItsContents) {
    const auto mallocs = fake_mallocs();
    void* const kept = allocate(5 * MiB + 7);
    void* const lost = allocate(9 * MiB, false);
    EXPECT_EQ(fake_mallocs(), mallocs);
    const auto resident = physical();
    EXPECT_GE(resident, 14 * MiB);
    fill(kept, 5 * MiB + 7, 42);
    fill(lost, 9 * MiB, 43);
    const auto waits = fake_waits(0);
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
    EXPECT_GT(fake_waits(0), waits) << "work in flight would fault";
    EXPECT_LE(physical(), resident - 14 * MiB);
    ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_TRUE(holds(kept, 5 * MiB + 7, 42));
    fill(lost, 9 * MiB, 44);
    EXPECT_EQ(cudaFree(kept), 0);
    EXPECT_EQ(cudaFree(lost), 0);
    EXPECT_LE(physical(), resident - 14 * MiB) << "freed memory is there for others";
    EXPECT_EQ(cudaFree(kept), 1) << "freed before: the runtime knows nothing of it";
}

TEST_F(Preload, TagsAreIndependentAndMisusesOfThemAreDefined) {
    void* const first = allocate(2 * MiB);
    fill(first, 2 * MiB, 1);
    const std::string other = tag + " other";
    tms.tms_set_current_tag(other.c_str());
    EXPECT_EQ(tms.tms_get_current_tag(), other);
    void* const second = allocate(2 * MiB);
    fill(second, 2 * MiB, 2);
    const auto resident = physical();

    EXPECT_EQ(tms.tms_pause("nobody has this tag"), 0);
    EXPECT_EQ(tms.tms_resume("nobody has this tag"), 0);
    EXPECT_EQ(tms.tms_resume(tag.c_str()), 0) << "of what was not paused";
    EXPECT_EQ(physical(), resident);
    EXPECT_TRUE(holds(first, 2 * MiB, 1));

    EXPECT_EQ(tms.tms_pause(tag.c_str()), 0);
    EXPECT_EQ(tms.tms_pause(tag.c_str()), 0) << "twice";
    EXPECT_TRUE(holds(second, 2 * MiB, 2));
    EXPECT_EQ(tms.tms_pause(""), 0) << "all tags";
    EXPECT_LE(physical(), resident - 4 * MiB);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_TRUE(holds(first, 2 * MiB, 1));
    EXPECT_TRUE(holds(second, 2 * MiB, 2));

    tms.tms_set_current_tag(nullptr);
    EXPECT_EQ(tms.tms_get_current_tag(), other) << "null is refused";
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
    EXPECT_EQ(cudaFree(first), 0);
    EXPECT_EQ(cudaFree(second), 0);
}

TEST_F(Preload, WhatIsFreedWhilePausedDoesNotComeBack) {
    void* const freed = allocate(4 * MiB);
    void* const stays = allocate(4 * MiB);
    fill(stays, 4 * MiB, 5);
    ASSERT_EQ(tms.tms_pause(nullptr), 0);
    const auto paused = physical();
    EXPECT_EQ(cudaFree(freed), 0);
    ASSERT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_TRUE(holds(stays, 4 * MiB, 5));
    EXPECT_LE(physical(), paused + 6 * MiB);
    EXPECT_EQ(cudaFree(stays), 0);
}

TEST_F(Preload, MemoryAskedForWhileItsTagIsPausedIsThereAtOnceAndCyclesLeaveNothingBehind) {
    void* const before = allocate(2 * MiB);
    fill(before, 2 * MiB, 1);
    std::uint64_t reservations = 0;
    for (int cycle = 0; cycle < 20; ++cycle) {
        ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
        void* const meanwhile = allocate(2 * MiB);
        fill(meanwhile, 2 * MiB, 2);
        ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
        EXPECT_TRUE(holds(before, 2 * MiB, 1));
        EXPECT_TRUE(holds(meanwhile, 2 * MiB, 2));
        ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
        ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
        EXPECT_TRUE(holds(meanwhile, 2 * MiB, 2)) << "it steps aside like the rest";
        EXPECT_EQ(cudaFree(meanwhile), 0);
        const auto now = devices[0].stats().reservations;
        EXPECT_TRUE(cycle == 0 || now <= reservations) << now;
        reservations = now;
    }
    EXPECT_EQ(cudaFree(before), 0);
}

TEST_F(Preload, MemoryIsOnTheCurrentDeviceAndFreedFromAnother) {
    ASSERT_EQ(cudaSetDevice(1), 0);
    const auto before = physical(1);
    void* const there = allocate(4 * MiB);
    EXPECT_GE(physical(1), before + 4 * MiB);
    fill(there, 4 * MiB, 9);
    ASSERT_EQ(cudaSetDevice(0), 0);
    void* const here = allocate(4 * MiB);
    const auto waits = fake_waits(1);
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0) << "on both";
    EXPECT_EQ(current(), 0) << "the caller's device is as it was";
    EXPECT_GT(fake_waits(1), waits);
    EXPECT_EQ(physical(1), before);
    ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_TRUE(holds(there, 4 * MiB, 9));
    EXPECT_EQ(cudaFree(there), 0);
    EXPECT_EQ(current(), 0);
    EXPECT_EQ(physical(1), before);
    EXPECT_EQ(cudaFree(here), 0);
}

TEST_F(Preload, OutOfMemoryIsAValueAndTheRuntimesLastError) {
    tms.tms_set_interesting_region(true);
    for (const std::size_t bytes : {std::size_t{1} << 62, std::size_t{1} << 44}) {
        void* block = &block;
        EXPECT_EQ(cudaMalloc(&block, bytes), 2);
        EXPECT_EQ(block, &block) << "nothing has changed";
        EXPECT_EQ(cudaGetLastError(), 2);
        EXPECT_EQ(tms.tms_last_error(nullptr), 2);
    }
    devices[0].set_budget(physical() + 4 * MiB);
    void* const block = allocate(2 * MiB);
    tms.tms_set_interesting_region(true);
    void* more = nullptr;
    EXPECT_EQ(cudaMalloc(&more, 8 * MiB), 2);
    EXPECT_EQ(cudaGetLastError(), 2);
    EXPECT_EQ(cudaFree(block), 0);
    EXPECT_EQ(cudaGetLastError(), 0);
}

TEST_F(Preload, TheMarginStaysFree) {
    tms.tms_set_interesting_region(true);
    fake_set_free_bytes(100 * MiB);
    tms.set_memory_margin_bytes(60 * MiB);
    void* block = nullptr;
    EXPECT_EQ(cudaMalloc(&block, 40 * MiB + 1), 2);
    EXPECT_EQ(cudaGetLastError(), 2);
    EXPECT_NE(last_words().find("margin"), std::string::npos);
    ASSERT_EQ(cudaMalloc(&block, 40 * MiB), 0);
    EXPECT_EQ(cudaFree(block), 0);
    fake_set_free_bytes(10 * MiB);
    EXPECT_EQ(cudaMalloc(&block, MiB), 2) << "less is free than the margin";
    EXPECT_EQ(cudaMalloc(&block, 11 * MiB), 2);
    tms.tms_set_interesting_region(false);
    ASSERT_EQ(cudaMalloc(&block, MiB), 0) << "outside a region it is the runtime's business";
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, AResumeWithoutMemoryIsAValueAndCanBeRepeated) {
    void* const block = allocate(8 * MiB);
    fill(block, 8 * MiB, 3);
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
    devices[0].set_budget(physical() + 8 * MiB);
    tms.tms_set_current_tag((tag + " another's").c_str());
    void* const others = allocate(6 * MiB);
    EXPECT_EQ(tms.tms_resume(tag.c_str()), 2);
    EXPECT_EQ(tms.tms_last_error(nullptr), 2);
    EXPECT_EQ(tms.tms_resume(tag.c_str()), 2);
    EXPECT_NE(tms.tms_get_cpu_backup_pointer(static_cast<std::uint8_t*>(block), MiB), nullptr)
        << "still paused";
    EXPECT_EQ(cudaFree(others), 0);
    EXPECT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_TRUE(holds(block, 8 * MiB, 3));
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, InACaptureMemoryComesButDoesNotGo) {
    void* const block = allocate(2 * MiB);
    const auto broken = fake_broken_captures();
    fake_set_capture(1);
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_EQ(cudaFree(block), 900);
    EXPECT_EQ(cudaGetLastError(), 0) << "the question is not the program's";
    fill(block, 2 * MiB, 1);
    void* const captured = allocate(2 * MiB);
    fill(captured, 2 * MiB, 2);
    EXPECT_EQ(fake_broken_captures(), broken) << "a capture that can be seen stays intact";
    fake_set_capture(2);
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_EQ(cudaGetLastError(), 0);
    fill(block, 2 * MiB, 1);
    fake_set_capture(0);
    EXPECT_EQ(tms.tms_pause(nullptr), 0);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_EQ(cudaFree(block), 0);
    EXPECT_EQ(cudaFree(captured), 0);
}

TEST_F(Preload, ACaptureThatBeganHereIsKnownUntilItEnds) {
    void* const block = allocate(2 * MiB);
    fill(block, 2 * MiB, 1);
    int one = 0, two = 0;
    void* graph = nullptr;
    const auto broken = fake_broken_captures();
    EXPECT_EQ(cudaStreamBeginCapture(nullptr, 0), 900) << "one that does not begin";
    static_cast<void>(cudaGetLastError());
    EXPECT_EQ(cudaStreamBeginCapture(&one, 0), 0);
    EXPECT_EQ(cudaStreamBeginCapture(&two, 2), 0);
    EXPECT_EQ(cudaStreamBeginCapture(&two, 2), 901)
        << "which does not end the capture that there is";
    static_cast<void>(cudaGetLastError());
    EXPECT_EQ(cudaStreamEndCapture(&one, &graph), 0);
    const auto waits = fake_waits(0);
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_EQ(tms.tms_last_error(nullptr), 900);
    EXPECT_EQ(cudaFree(block), 900);
    EXPECT_EQ(fake_waits(0), waits) << "nobody waits for a device";
    EXPECT_EQ(fake_broken_captures(), broken);
    EXPECT_TRUE(holds(block, 2 * MiB, 1));
    EXPECT_EQ(cudaStreamEndCapture(&one, &graph), 901) << "somebody ends what has ended";
    static_cast<void>(cudaGetLastError());
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_EQ(cudaStreamEndCapture(&two, &graph), 0);
    EXPECT_EQ(tms.tms_pause(nullptr), 0);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, ArenasOfATagThatIsIncludedArePausedWithIt) {
    const std::string graphs = tag + " of graphs";
    vmmgraph::ArenaOptions options;
    options.tag = graphs;
    vmmgraph::SharedVmmAllocator arena(devices[1], options);
    const auto paused = [&] { return arena.stats().paused != 0; };
    EXPECT_EQ(tms.tms_include_arenas(nullptr, 1), 1);
    EXPECT_EQ(tms.tms_include_arenas("", 1), 1);
    EXPECT_EQ(tms.tms_include_arenas(graphs.c_str(), -1), 1);
    EXPECT_EQ(tms.tms_pause(graphs.c_str()), 0);
    EXPECT_FALSE(paused()) << "nobody has said that it has arenas";
    EXPECT_EQ(tms.tms_include_arenas(graphs.c_str(), 1), 0);
    EXPECT_EQ(tms.tms_include_arenas(graphs.c_str(), 1), 0) << "again";
    EXPECT_EQ(tms.tms_pause(tag.c_str()), 0);
    EXPECT_FALSE(paused());
    EXPECT_EQ(tms.tms_pause(graphs.c_str()), 0);
    EXPECT_TRUE(paused());
    EXPECT_EQ(tms.tms_resume(graphs.c_str()), 0);
    EXPECT_FALSE(paused());
    EXPECT_EQ(tms.tms_pause(nullptr), 0);
    EXPECT_TRUE(paused());
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_FALSE(paused());
}

TEST_F(Preload, StreamsThatItWasToldOfAreAsked) {
    void* const block = allocate(2 * MiB);
    static int told = 0, untold = 0;
    void* const streams[] = {&told};
    EXPECT_EQ(tms.tms_watch_streams(nullptr, 1), 1);
    EXPECT_EQ(tms.tms_watch_streams(nullptr, 0), 0);
    EXPECT_EQ(tms.tms_watch_streams(streams, 1), 0);
    EXPECT_EQ(tms.tms_watch_streams(streams, 1), 0) << "again";
    const auto broken = fake_broken_captures();
    void* graph = nullptr;
    EXPECT_FALSE(tms.tms_is_capturing());
    EXPECT_EQ(fake_begin_capture(&told), 0);
    EXPECT_TRUE(tms.tms_is_capturing());
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_EQ(fake_broken_captures(), broken);
    EXPECT_EQ(cudaStreamEndCapture(&told, &graph), 0);
    EXPECT_FALSE(tms.tms_is_capturing());
    EXPECT_EQ(fake_begin_capture(&untold), 0);
    EXPECT_EQ(tms.tms_pause(nullptr), 900);
    EXPECT_GT(fake_broken_captures(), broken) << "of this one nobody knew";
    EXPECT_EQ(cudaStreamEndCapture(&untold, &graph), 0);
    EXPECT_EQ(tms.tms_pause(nullptr), 0);
    EXPECT_EQ(tms.tms_resume(nullptr), 0);
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, CapturesBeginAndEndBesidePausesAndNoneIsBroken) {
    void* const block = allocate(2 * MiB);
    const auto broken = fake_broken_captures();
    std::atomic<bool> over{false};
    std::thread captures([&] {
        int stream = 0;
        void* graph = nullptr;
        for (int i = 0; i < 2000; ++i) {
            EXPECT_EQ(cudaStreamBeginCapture(&stream, 1), 0);
            EXPECT_EQ(cudaStreamEndCapture(&stream, &graph), 0);
        }
        over = true;
    });
    unsigned paused = 0, refused = 0;
    while (!over || paused == 0) {
        const int code = tms.tms_pause(nullptr);
        ASSERT_TRUE(code == 0 || code == 900);
        ++(code == 0 ? paused : refused);
        EXPECT_EQ(tms.tms_resume(nullptr), 0);
    }
    captures.join();
    EXPECT_EQ(fake_broken_captures(), broken) << paused << " pauses, " << refused << " refused";
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, BackupsCanBeReadWhileMemoryIsPaused) {
    auto* const block = static_cast<std::uint8_t*>(allocate(6 * MiB));
    auto* const lost = static_cast<std::uint8_t*>(allocate(2 * MiB, false));
    fill(block, 3 * MiB, 1);
    fill(block + 3 * MiB, 3 * MiB, 2);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block, 6 * MiB), nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0) << "that it is there is no failure";
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
    const std::uint8_t* const all = tms.tms_get_cpu_backup_pointer(block, 6 * MiB);
    ASSERT_NE(all, nullptr);
    EXPECT_TRUE(holds(all, 3 * MiB, 1));
    EXPECT_TRUE(holds(all + 3 * MiB, 3 * MiB, 2));
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block, 6 * MiB), all) << "one copy";
    const std::uint8_t* const part = tms.tms_get_cpu_backup_pointer(block + 3 * MiB - 5, 10);
    ASSERT_NE(part, nullptr);
    EXPECT_TRUE(holds(part, 5, 1));
    EXPECT_TRUE(holds(part + 5, 5, 2));
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);

    int foreign = 0;
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(reinterpret_cast<std::uint8_t*>(&foreign), 4),
              nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block + MiB, 6 * MiB), nullptr) << "beyond its end";
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(lost, MiB), nullptr) << "without backup";
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);

    ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block, 6 * MiB), nullptr);
    EXPECT_EQ(cudaFree(block), 0);
    EXPECT_EQ(cudaFree(lost), 0);
}

TEST_F(Preload, RetainedBackupsStayAndAreRefreshed) {
    auto* const block = static_cast<std::uint8_t*>(allocate(2 * MiB));
    fill(block, 2 * MiB, 1);
    EXPECT_FALSE(tms.tms_get_retain_cpu_backup());
    tms.tms_set_retain_cpu_backup(true);
    EXPECT_TRUE(tms.tms_get_retain_cpu_backup());
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
    const std::uint8_t* const kept = tms.tms_get_cpu_backup_pointer(block, 2 * MiB);
    ASSERT_NE(kept, nullptr);
    ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block, 2 * MiB), kept);
    fill(block, 2 * MiB, 2);
    EXPECT_TRUE(holds(kept, 2 * MiB, 1));
    ASSERT_EQ(tms.tms_pause(tag.c_str()), 0);
    EXPECT_EQ(tms.tms_get_cpu_backup_pointer(block, 2 * MiB), kept);
    EXPECT_TRUE(holds(kept, 2 * MiB, 2));
    ASSERT_EQ(tms.tms_resume(tag.c_str()), 0);
    EXPECT_EQ(cudaFree(block), 0);
}

TEST_F(Preload, SettingsHaveGettersAndWhatIsNotOfferedIsRefused) {
    EXPECT_STREQ(tms.tms_get_cpu_backup_backend(), "pinned");
    tms.tms_set_cpu_backup_backend("mmap");
    EXPECT_STREQ(tms.tms_get_cpu_backup_backend(), "mmap");
    for (const char* wrong : {static_cast<const char*>(nullptr), "disk"}) {
        tms.tms_set_cpu_backup_backend(wrong);
        EXPECT_EQ(tms.tms_last_error(nullptr), 1);
        EXPECT_STREQ(tms.tms_get_cpu_backup_backend(), "mmap");
    }
    tms.tms_set_cpu_backup_backend("pinned");
    EXPECT_FALSE(tms.tms_get_enable_disk_backup());
    tms.tms_set_enable_disk_backup(true);
    EXPECT_TRUE(tms.tms_get_enable_disk_backup());
    tms.tms_set_enable_disk_backup(false);
    EXPECT_FALSE(tms.tms_get_enable_disk_backup());
    tms.tms_set_disk_backup_dir("/tmp");
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
    tms.tms_set_disk_backup_dir(nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    tms.tms_set_enable_cpu_backup(true);
    EXPECT_TRUE(tms.tms_get_enable_cpu_backup());
    tms.tms_set_interesting_region(true);
    EXPECT_TRUE(tms.tms_get_interesting_region());
}

TEST_F(Preload, TheHookModeWorksBesideAndRefusesWhatEndedTheProcess) {
    EXPECT_EQ(tms.tms_torch_malloc(MiB, 0, nullptr), nullptr) << "outside a region";
    EXPECT_EQ(tms.tms_last_error(nullptr), 401);
    tms.tms_set_interesting_region(true);
    EXPECT_EQ(tms.tms_torch_malloc(0, 0, nullptr), nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
    EXPECT_EQ(tms.tms_torch_malloc(-1, 0, nullptr), nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    EXPECT_EQ(tms.tms_torch_malloc(MiB, -1, nullptr), nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 1);
    void* const block = tms.tms_torch_malloc(MiB, 1, nullptr);
    ASSERT_NE(block, nullptr);
    tms.tms_set_interesting_region(false);
    tms.tms_torch_free(block, MiB, 1, nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
    tms.tms_torch_free(block, MiB, 1, nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 1) << "freed before";
    tms.tms_torch_free(nullptr, 0, 0, nullptr);
    EXPECT_EQ(tms.tms_last_error(nullptr), 0);
}

}  // namespace
