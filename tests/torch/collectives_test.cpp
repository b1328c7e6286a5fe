// All-reduces in captures on two GPUs, in one process and in two, with retained blocks beside their buffers. NCCL is the one that torch
// loaded; it registers buffers of captures by itself, and a seal exchanges pages under retained blocks.
#include "fixture.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

extern char** environ;

namespace torch_tests {
namespace {

// nccl.h, whose numbers are fixed: ncclFloat32 and ncclSum.
constexpr int nccl_float = 7;
constexpr int nccl_sum = 0;
struct UniqueId {
    char bytes[128];
};
using Comm = void*;

// NCCL's functions, from the library in this process.
struct Nccl {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    template <class F>
    F* get(const char* name) const {
        auto* const found = library == nullptr ? nullptr : dlsym(library, name);
        EXPECT_NE(found, nullptr) << name;
        return reinterpret_cast<F*>(found);
    }
    int (*init_all)(Comm*, int, const int*) = get<int(Comm*, int, const int*)>("ncclCommInitAll");
    int (*unique_id)(UniqueId*) = get<int(UniqueId*)>("ncclGetUniqueId");
    int (*init_rank)(Comm*, int, UniqueId, int) = get<int(Comm*, int, UniqueId, int)>("ncclCommInitRank");
    int (*all_reduce)(const void*, void*, std::size_t, int, int, Comm,
                      cudaStream_t) = get<int(const void*, void*, std::size_t, int, int, Comm, cudaStream_t)>("ncclAllReduce");
    int (*all_gather)(const void*, void*, std::size_t, int, Comm,
                      cudaStream_t) = get<int(const void*, void*, std::size_t, int, Comm, cudaStream_t)>("ncclAllGather");
    int (*group_start)() = get<int()>("ncclGroupStart");
    int (*group_end)() = get<int()>("ncclGroupEnd");
    int (*destroy)(Comm) = get<int(Comm)>("ncclCommDestroy");
};

at::TensorOptions floats(int device) { return at::TensorOptions().dtype(at::kFloat).device(c10::Device(c10::kCUDA, device)); }

// One rank's part of a capture: a buffer that is reduced in place and one into which both ranks' parts are gathered, between blocks that
// are retained and blocks that pass.
struct Part {
    c10::cuda::CUDAStream stream;
    std::int64_t elements;
    at::Tensor input;
    at::Tensor before, buffer, own, gathered, behind, output, pair;

    Part(int device, std::int64_t count)
        : stream(c10::cuda::getStreamFromPool(true, static_cast<c10::DeviceIndex>(device))),
          elements(count),
          input(at::zeros({count}, floats(device))) {}

    // With `marked`, what stays is made in a scope that says so.
    void prepare(bool keep_buffers, bool marked) {
        using vmmgraph::torch::KeptScope;
        std::optional<KeptScope> outputs, buffers;
        if (marked) {
            outputs.emplace();
        }
        before = input + 1;
        outputs.reset();
        if (marked && keep_buffers) {
            buffers.emplace();
        }
        buffer = input * 2;
        own = input + 5;
        gathered = at::empty({2 * elements}, input.options());
        buffers.reset();
        if (marked) {
            outputs.emplace();
        }
        behind = input + 3;
        output = at::empty_like(input);
        pair = at::empty({2 * elements}, input.options());
    }
    void communicate(const Nccl& nccl, Comm comm) const {
        ASSERT_EQ(nccl.all_reduce(buffer.data_ptr(), buffer.data_ptr(), elements, nccl_float, nccl_sum, comm, stream.stream()), 0);
        ASSERT_EQ(nccl.all_gather(own.data_ptr(), gathered.data_ptr(), elements, nccl_float, comm, stream.stream()), 0);
    }
    void finish(bool keep_buffers) {
        at::add_out(output, buffer, before);
        pair.copy_(gathered);
        if (!keep_buffers) {
            buffer = own = gathered = at::Tensor();
        }
    }
    // With the input `mine` on this rank and `theirs` on the other.
    int wrong(int rank, float mine, float theirs, bool keep_buffers) const {
        const float first = (rank == 0 ? mine : theirs) + 5, second = (rank == 0 ? theirs : mine) + 5;
        const auto both = at::cat({at::full_like(input, first), at::full_like(input, second)});
        int wrong = !at::equal(pair, both) + (keep_buffers && !at::equal(gathered, both));
        wrong += !at::equal(output, at::full_like(output, 2 * (mine + theirs) + mine + 1));
        wrong += !at::equal(before, at::full_like(before, mine + 1));
        wrong += !at::equal(behind, at::full_like(behind, mine + 3));
        wrong += keep_buffers && !at::equal(buffer, at::full_like(buffer, 2 * (mine + theirs)));
        return wrong;
    }
};

// From a slab to several pages.
constexpr std::int64_t sizes[] = {1 << 10, 1 << 15, 3 << 18, 5 << 20, 9 << 20};

class Collectives : public Torch {
protected:
    void SetUp() override {
        if (c10::cuda::device_count() < 2) {
            GTEST_SKIP() << "SKIPPED: needs two GPUs";
        }
        // Multicast is not for every machine.
        setenv("NCCL_NVLS_ENABLE", "0", 1);
        Torch::SetUp();
    }
};

TEST_F(Collectives, InOneProcessWithTwoDevices) {
    const Nccl nccl;
    Comm comms[2];
    const int devices[] = {0, 1};
    ASSERT_EQ(nccl.init_all(comms, 2, devices), 0);
    std::array<SharedVmmAllocator, 2> arenas{SharedVmmAllocator(0), SharedVmmAllocator(1)};
    struct Captured {
        std::array<Part, 2> parts;
        std::vector<CapturedGraph> graphs;
        bool keep;
    };
    const auto capture_both = [&](Captured& one, bool marked) {
        std::array<std::optional<vmmgraph::torch::CaptureScope>, 2> scopes;
        for (const int rank : devices) {
            scopes[rank].emplace(arenas[rank], one.parts[rank].stream.stream());
            one.parts[rank].prepare(one.keep, marked);
        }
        ASSERT_EQ(nccl.group_start(), 0);
        for (const int rank : devices) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(rank));
            one.parts[rank].communicate(nccl, comms[rank]);
        }
        ASSERT_EQ(nccl.group_end(), 0);
        for (const int rank : {1, 0}) {
            const c10::cuda::CUDAStreamGuard guard(one.parts[rank].stream);
            one.parts[rank].finish(one.keep);
        }
        for (const int rank : {1, 0}) {
            one.graphs.insert(one.graphs.begin(), scopes[rank]->end());
            scopes[rank].reset();
        }
    };
    std::vector<Captured> all;
    int refused = 0;
    for (const bool marked : {true, false}) {
        for (const bool keep : {false, true}) {
            for (const auto count : sizes) {
                Captured one{{Part(0, count), Part(1, count)}, {}, keep};
                cudaDeviceSynchronize();
                try {
                    capture_both(one, marked);
                    all.push_back(std::move(one));
                } catch (const vmmgraph::Error& error) {
                    // Never for want of anything that a program could not say.
                    EXPECT_FALSE(marked) << error.what();
                    EXPECT_NE(std::string(error.what()).find("NCCL_GRAPH_REGISTER"), std::string::npos) << error.what();
                    ++refused;
                }
            }
        }
    }
    int wrong = 0, replays = 0;
    for (int round = 0; round < 6; ++round) {
        for (auto& one : all) {
            const float value[] = {static_cast<float>(round + 1), static_cast<float>(10 * round + 7)};
            for (const int rank : devices) {
                const c10::cuda::CUDAStreamGuard guard(one.parts[rank].stream);
                one.parts[rank].input.fill_(value[rank]);
            }
            for (const int rank : devices) {
                one.graphs[rank].replay(one.parts[rank].stream.stream());
            }
            for (const int rank : devices) {
                const c10::cuda::CUDAStreamGuard guard(one.parts[rank].stream);
                one.parts[rank].stream.synchronize();
                wrong += one.parts[rank].wrong(rank, value[rank], value[1 - rank], one.keep);
                ++replays;
            }
        }
    }
    EXPECT_EQ(wrong, 0);
    std::printf("RESULT collectives, one process: %d replays, %d wrong, %d captures refused\n", replays, wrong, refused);
    all.clear();
    for (const int rank : devices) {
        ASSERT_EQ(nccl.destroy(comms[rank]), 0);
    }
}

// One rank of the test below; started by it.
TEST(CollectivesRank, Run) {
    const char* const who = std::getenv("VMMGRAPH_TEST_RANK");
    if (who == nullptr) {
        GTEST_SKIP() << "a part of Collectives.InTwoProcesses";
    }
    const int rank = std::atoi(who);
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(rank));
    // The context, and torch's libraries.
    static_cast<void>(at::ones({1}, floats(rank)));
    vmmgraph::torch::install();
    const Nccl nccl;
    UniqueId id{};
    const std::string path = std::getenv("VMMGRAPH_TEST_ID");
    if (rank == 0) {
        ASSERT_EQ(nccl.unique_id(&id), 0);
        auto* const file = std::fopen((path + ".part").c_str(), "wb");
        ASSERT_NE(file, nullptr);
        ASSERT_EQ(std::fwrite(&id, sizeof id, 1, file), 1u);
        ASSERT_EQ(std::fclose(file), 0);
        ASSERT_EQ(std::rename((path + ".part").c_str(), path.c_str()), 0);
    } else {
        std::FILE* file = nullptr;
        while ((file = std::fopen(path.c_str(), "rb")) == nullptr) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        ASSERT_EQ(std::fread(&id, sizeof id, 1, file), 1u);
        ASSERT_EQ(std::fclose(file), 0);
    }
    Comm comm = nullptr;
    ASSERT_EQ(nccl.init_rank(&comm, 2, id, rank), 0);
    SharedVmmAllocator arena(rank);
    struct Captured {
        Part part;
        CapturedGraph graph;
        bool keep;
    };
    std::vector<Captured> all;
    for (const bool keep : {false, true}) {
        for (const auto count : sizes) {
            Part part(rank, count);
            cudaDeviceSynchronize();
            auto graph = capture(arena, part.stream.stream(), [&] {
                part.prepare(keep, false);
                part.communicate(nccl, comm);
                part.finish(keep);
            });
            all.push_back({part, std::move(graph), keep});
        }
    }
    int wrong = 0;
    for (int round = 0; round < 6; ++round) {
        for (auto& [part, graph, keep] : all) {
            const float value[] = {static_cast<float>(round + 1), static_cast<float>(10 * round + 7)};
            const c10::cuda::CUDAStreamGuard guard(part.stream);
            part.input.fill_(value[rank]);
            graph.replay(part.stream.stream());
            part.stream.synchronize();
            wrong += part.wrong(rank, value[rank], value[1 - rank], keep);
        }
    }
    EXPECT_EQ(wrong, 0);
    std::printf("RESULT collectives, rank %d of two processes: %zu replays, %d wrong\n", rank, 6 * all.size(), wrong);
    all.clear();
    EXPECT_EQ(nccl.destroy(comm), 0);
    vmmgraph::torch::uninstall();
}

TEST_F(Collectives, InTwoProcesses) {
    char self[PATH_MAX] = {};
    ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
    char folder[] = "/tmp/vmmgraph-ranks-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    const std::string id = std::string(folder) + "/id";
    setenv("VMMGRAPH_TEST_ID", id.c_str(), 1);
    std::array<pid_t, 2> ranks{};
    for (const int rank : {0, 1}) {
        setenv("VMMGRAPH_TEST_RANK", std::to_string(rank).c_str(), 1);
        std::string filter = "--gtest_filter=CollectivesRank.Run";
        char* const arguments[] = {self, filter.data(), nullptr};
        ASSERT_EQ(posix_spawn(&ranks[rank], self, nullptr, nullptr, arguments, environ), 0);
    }
    unsetenv("VMMGRAPH_TEST_RANK");
    // A rank that waits for one that is gone would wait for ever.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(90);
    std::array<bool, 2> over{};
    while (!over[0] || !over[1]) {
        for (const int rank : {0, 1}) {
            int status = 0;
            if (!over[rank] && waitpid(ranks[rank], &status, WNOHANG) == ranks[rank]) {
                over[rank] = true;
                EXPECT_EQ(status, 0) << "rank " << rank;
            }
        }
        if (std::chrono::steady_clock::now() > deadline) {
            for (const int rank : {0, 1}) {
                if (!over[rank]) {
                    static_cast<void>(kill(ranks[rank], SIGKILL));
                    ADD_FAILURE() << "rank " << rank << " hangs";
                    static_cast<void>(waitpid(ranks[rank], nullptr, 0));
                    over[rank] = true;
                }
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    static_cast<void>(unlink(id.c_str()));
    static_cast<void>(rmdir(folder));
}

}  // namespace
}  // namespace torch_tests
