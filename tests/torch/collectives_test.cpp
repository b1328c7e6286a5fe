// All-reduces and all-gathers in captures on two GPUs, next to retained blocks. NCCL registers
// capture buffers where it can; a seal exchanges pages under retained blocks.
#include "nccl.hpp"

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <vmmgraph/share.hpp>

namespace torch_tests {
namespace {

using vmmgraph::torch::KeptScope;
using vmmgraph::torch::RemoteScope;

// Scopes used by a capture: none; kept; remote; or `shared_remote` without any marked buffer.
enum class Marks { none, kept, remote, forgotten };

CaptureOptions options_for(Marks marks) {
    CaptureOptions options;
    if (marks == Marks::remote || marks == Marks::forgotten) {
        options.retain = Retain::shared_remote;
    }
    return options;
}

// One rank's part of a capture: NCCL buffers between retained and transient blocks.
struct Part {
    c10::cuda::CUDAStream stream;
    std::int64_t elements;
    at::Tensor input;
    at::Tensor before, buffer, own, gathered, behind, output, pair;

    Part(int device, std::int64_t count)
        : stream(c10::cuda::getStreamFromPool(true, static_cast<c10::DeviceIndex>(device))),
          elements(count),
          input(at::zeros({count}, floats(device))) {}

    void prepare(bool keep_buffers, Marks marks) {
        std::optional<KeptScope> stays;
        std::optional<RemoteScope> remote;
        if (marks == Marks::kept) {
            stays.emplace();
        }
        before = input + 1;
        if (!keep_buffers) {
            stays.reset();
        }
        if (marks == Marks::forgotten) {
            const RemoteScope another;
            static_cast<void>(at::empty_like(input));
        } else if (marks == Marks::remote) {
            remote.emplace();
        }
        buffer = input * 2;
        own = input + 5;
        gathered = at::empty({2 * elements}, input.options());
        remote.reset();
        if (marks == Marks::kept) {
            stays.emplace();
        }
        behind = input + 3;
        output = at::empty_like(input);
        pair = at::empty({2 * elements}, input.options());
    }
    void communicate(const Nccl& nccl, Comm comm) const {
        ASSERT_EQ(nccl.all_reduce(buffer.data_ptr(), buffer.data_ptr(), elements, nccl_float,
                                  nccl_sum, comm, stream.stream()),
                  0);
        ASSERT_EQ(nccl.all_gather(own.data_ptr(), gathered.data_ptr(), elements, nccl_float, comm,
                                  stream.stream()),
                  0);
    }
    void finish(bool keep_buffers) {
        at::add_out(output, buffer, before);
        pair.copy_(gathered);
        if (!keep_buffers) {
            buffer = own = gathered = at::Tensor();
        }
    }
    int wrong(int rank, float mine, float theirs, bool keep_buffers) const {
        const float first = (rank == 0 ? mine : theirs) + 5,
                    second = (rank == 0 ? theirs : mine) + 5;
        const auto both = at::cat({at::full_like(input, first), at::full_like(input, second)});
        int wrong = !at::equal(pair, both) + (keep_buffers && !at::equal(gathered, both));
        wrong += !at::equal(output, at::full_like(output, 2 * (mine + theirs) + mine + 1));
        wrong += !at::equal(before, at::full_like(before, mine + 1));
        wrong += !at::equal(behind, at::full_like(behind, mine + 3));
        wrong += keep_buffers && !at::equal(buffer, at::full_like(buffer, 2 * (mine + theirs)));
        return wrong;
    }
};

constexpr std::int64_t sizes[] = {1 << 10, 1 << 15, 3 << 18, 5 << 20, 9 << 20};

using Collectives = TwoGpus;

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
    const auto capture_both = [&](Captured& one, Marks marks) {
        std::array<std::optional<vmmgraph::torch::CaptureScope>, 2> scopes;
        for (const int rank : devices) {
            scopes[rank].emplace(arenas[rank], one.parts[rank].stream.stream(), options_for(marks));
            one.parts[rank].prepare(one.keep, marks);
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
            EXPECT_EQ(one.graphs.front().report().remote_blocks,
                      marks == Marks::remote && one.keep ? 3U : 0U);
        }
    };
    std::vector<Captured> all;
    int refused = 0;
    for (const Marks marks : {Marks::kept, Marks::remote, Marks::none}) {
        for (const bool keep : {false, true}) {
            for (const auto count : sizes) {
                Captured one{{Part(0, count), Part(1, count)}, {}, keep};
                cudaDeviceSynchronize();
                try {
                    capture_both(one, marks);
                    all.push_back(std::move(one));
                } catch (const vmmgraph::Error& error) {
                    // Only unmarked captures may be refused.
                    EXPECT_EQ(marks, Marks::none) << error.what();
                    EXPECT_NE(std::string(error.what()).find("NCCL_GRAPH_REGISTER"),
                              std::string::npos)
                        << error.what();
                    ++refused;
                }
            }
        }
    }
    int wrong = 0, replays = 0;
    for (int round = 0; round < 6; ++round) {
        for (auto& one : all) {
            const float value[] = {static_cast<float>(round + 1),
                                   static_cast<float>(10 * round + 7)};
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
    std::printf("RESULT collectives, one process: %d replays, %d wrong, %d captures refused\n",
                replays, wrong, refused);
    all.clear();
    for (const int rank : devices) {
        ASSERT_EQ(nccl.destroy(comms[rank]), 0);
    }
}

// Started by the tests below.
TEST(CollectivesRank, Run) {
    if (rank_here() < 0) {
        GTEST_SKIP() << "a part of Collectives.InTwoProcesses";
    }
    const Rank here;
    const int rank = here.rank;
    vmmgraph::DeviceOptions how;
    how.driver = vmmgraph::DriverChoice::cuda;
    how.device = rank;
    const bool shared = std::getenv("VMMGRAPH_TEST_SHARED") != nullptr;
    how.sharing = shared ? vmmgraph::Sharing::fd : vmmgraph::Sharing::none;
    const auto device = vmmgraph::Device::open(how);
    struct Captured {
        Part part;
        CapturedGraph graph;
        bool keep;
    };
    int wrong = 0, replays = 0, refused = 0;
    const auto replay = [&](std::vector<Captured>& all, int rounds) {
        int differ = 0;
        for (int round = 0; round < rounds; ++round) {
            for (auto& [part, graph, keep] : all) {
                const float value[] = {static_cast<float>(round + 1),
                                       static_cast<float>(10 * round + 7)};
                const c10::cuda::CUDAStreamGuard guard(part.stream);
                part.input.fill_(value[rank]);
                graph.replay(part.stream.stream());
                part.stream.synchronize();
                differ += part.wrong(rank, value[rank], value[1 - rank], keep);
                ++replays;
            }
        }
        return differ;
    };
    const auto capture_one = [&](SharedVmmAllocator& arena, std::int64_t count, bool keep,
                                 Marks marks) {
        Part part(rank, count);
        cudaDeviceSynchronize();
        auto graph = capture(
            arena, part.stream.stream(),
            [&] {
                part.prepare(keep, marks);
                part.communicate(here.nccl, here.comm);
                part.finish(keep);
            },
            options_for(marks));
        return Captured{part, std::move(graph), keep};
    };
    {
        SharedVmmAllocator arena(device);
        std::vector<Captured> all;
        for (const Marks marks : {Marks::kept, Marks::remote, Marks::none}) {
            for (const bool keep : {false, true}) {
                for (const auto count : sizes) {
                    try {
                        all.push_back(capture_one(arena, count, keep, marks));
                    } catch (const vmmgraph::Error& error) {
                        // Equal layouts: both ranks refuse.
                        EXPECT_TRUE(shared && marks == Marks::none) << error.what();
                        EXPECT_NE(std::string(error.what()).find("RemoteScope"), std::string::npos)
                            << error.what();
                        ++refused;
                    }
                }
            }
        }
        wrong = replay(all, 6);
    }
    EXPECT_EQ(wrong, 0);
    int forgotten = 0;
    if (shared) {
        // Control: no buffer is marked. The seal exchanges a page with both buffers and a retained
        // block.
        SharedVmmAllocator arena(device);
        std::vector<Captured> all;
        all.push_back(capture_one(arena, sizes[2], false, Marks::forgotten));
        forgotten = replay(all, 2);
        EXPECT_GT(forgotten, 0) << "the control shows nothing";
    }
    std::printf(
        "RESULT collectives, rank %d of two processes%s: %d replays, %d wrong, %d captures "
        "refused, %d wrong in the control\n",
        rank, shared ? " with pages for each other" : "", replays, wrong, refused, forgotten);
}

TEST_F(Collectives, InTwoProcesses) { run_ranks("CollectivesRank.Run"); }

TEST_F(Collectives, InTwoProcessesWithPagesForEachOther) {
    setenv("VMMGRAPH_TEST_SHARED", "1", 1);
    // NCCL registers buffers for this protocol only.
    setenv("NCCL_PROTO", "Simple", 1);
    run_ranks("CollectivesRank.Run");
    unsetenv("VMMGRAPH_TEST_SHARED");
    unsetenv("NCCL_PROTO");
}

}  // namespace
}  // namespace torch_tests
