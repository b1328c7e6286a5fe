// Torch's copy of NCCL, and two cooperating processes with one GPU each. Needs two GPUs.
#pragma once

#include "fixture.hpp"

#include <dlfcn.h>
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

// Constants of nccl.h: ncclFloat32, ncclSum, NCCL_WIN_COLL_SYMMETRIC.
inline constexpr int nccl_float = 7;
inline constexpr int nccl_sum = 0;
inline constexpr int nccl_symmetric = 1;
struct UniqueId {
    char bytes[128];
};
using Comm = void*;

// Functions of the loaded NCCL.
struct Nccl {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    // Null if this release lacks the function.
    template <class F>
    F* find(const char* name) const {
        return reinterpret_cast<F*>(library == nullptr ? nullptr : dlsym(library, name));
    }
    template <class F>
    F* get(const char* name) const {
        auto* const found = find<F>(name);
        EXPECT_NE(found, nullptr) << name;
        return found;
    }
    int (*init_all)(Comm*, int, const int*) = get<int(Comm*, int, const int*)>("ncclCommInitAll");
    int (*unique_id)(UniqueId*) = get<int(UniqueId*)>("ncclGetUniqueId");
    int (*init_rank)(Comm*, int, UniqueId,
                     int) = get<int(Comm*, int, UniqueId, int)>("ncclCommInitRank");
    int (*all_reduce)(const void*, void*, std::size_t, int, int, Comm, cudaStream_t) =
        get<int(const void*, void*, std::size_t, int, int, Comm, cudaStream_t)>("ncclAllReduce");
    int (*all_gather)(const void*, void*, std::size_t, int, Comm, cudaStream_t) =
        get<int(const void*, void*, std::size_t, int, Comm, cudaStream_t)>("ncclAllGather");
    int (*group_start)() = get<int()>("ncclGroupStart");
    int (*group_end)() = get<int()>("ncclGroupEnd");
    int (*destroy)(Comm) = get<int(Comm)>("ncclCommDestroy");
    // NCCL 2.19 and later.
    int (*register_buffer)(Comm, void*, std::size_t, void**) =
        find<int(Comm, void*, std::size_t, void**)>("ncclCommRegister");
    int (*deregister)(Comm, void*) = find<int(Comm, void*)>("ncclCommDeregister");
    // NCCL 2.27 and later.
    int (*register_window)(Comm, void*, std::size_t, void**, int) =
        find<int(Comm, void*, std::size_t, void**, int)>("ncclCommWindowRegister");
    int (*deregister_window)(Comm, void*) = find<int(Comm, void*)>("ncclCommWindowDeregister");
};

inline at::TensorOptions floats(int device) {
    return at::TensorOptions().dtype(at::kFloat).device(c10::Device(c10::kCUDA, device));
}

// This process's rank; -1 outside run_ranks.
inline int rank_here() {
    const char* const rank = std::getenv("VMMGRAPH_TEST_RANK");
    return rank == nullptr ? -1 : std::atoi(rank);
}

// A rank, on the GPU of the same number.
struct Rank {
    int rank = rank_here();
    Nccl nccl;
    Comm comm = nullptr;

    Rank() : nccl(set_up(rank)) { join(); }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    ~Rank() {
        EXPECT_EQ(nccl.destroy(comm), 0);
        vmmgraph::torch::uninstall();
    }

private:
    static Nccl set_up(int rank) {
        c10::cuda::set_device(static_cast<c10::DeviceIndex>(rank));
        static_cast<void>(at::ones({1}, floats(rank)));
        vmmgraph::torch::install();
        return {};
    }

    // Rank 0 publishes the id in a file.
    void join() {
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
        ASSERT_EQ(nccl.init_rank(&comm, 2, id, rank), 0);
    }
};

inline void run_ranks(const std::string& test) {
    char self[PATH_MAX] = {};
    ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
    char folder[] = "/tmp/vmmgraph-ranks-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    const std::string id = std::string(folder) + "/id";
    setenv("VMMGRAPH_TEST_ID", id.c_str(), 1);
    std::array<pid_t, 2> ranks{};
    for (const int rank : {0, 1}) {
        setenv("VMMGRAPH_TEST_RANK", std::to_string(rank).c_str(), 1);
        std::string filter = "--gtest_filter=" + test;
        char* const arguments[] = {self, filter.data(), nullptr};
        ASSERT_EQ(posix_spawn(&ranks[rank], self, nullptr, nullptr, arguments, environ), 0);
    }
    unsetenv("VMMGRAPH_TEST_RANK");
    // A rank would wait forever for a dead peer.
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

// Skips without two GPUs.
class TwoGpus : public Torch {
protected:
    void SetUp() override {
        if (c10::cuda::device_count() < 2) {
            GTEST_SKIP() << "SKIPPED: needs two GPUs";
        }
        // Some machines lack multicast.
        setenv("NCCL_NVLS_ENABLE", "0", 1);
        Torch::SetUp();
    }
};

}  // namespace torch_tests
