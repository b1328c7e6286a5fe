// Exclusive blocks as NCCL buffers: registered, and as a symmetric-memory window. Compared with
// unregistered memory, in captured graphs of two processes on two GPUs.
#include "nccl.hpp"

#include <cstdint>
#include <cstdio>

#include <vmmgraph/share.hpp>

namespace torch_tests {
namespace {

constexpr std::int64_t elements = 3 << 20;
constexpr int rounds = 40;

enum class As { nothing, buffer, window };

constexpr const char* name(As as) {
    return as == As::nothing ? "unregistered" : as == As::buffer ? "registered" : "a window";
}

// Returns the rounds that differ from torch's own memory, or -1 if NCCL lacks the function.
int differing(const Rank& here, SharedVmmAllocator& arena, const c10::cuda::CUDAStream& stream,
              As as) {
    const auto& nccl = here.nccl;
    if (as == As::buffer ? nccl.register_buffer == nullptr
                         : as == As::window && nccl.register_window == nullptr) {
        return -1;
    }
    constexpr std::size_t bytes = 2 * elements * sizeof(float);
    void* const block = arena.allocate_exclusive(bytes);
    void* handle = nullptr;
    if (as == As::buffer) {
        EXPECT_EQ(nccl.register_buffer(here.comm, block, bytes, &handle), 0);
        EXPECT_NE(handle, nullptr);
    } else if (as == As::window) {
        // Waits for the other rank's block of equal length.
        EXPECT_EQ(nccl.register_window(here.comm, block, bytes, &handle, nccl_symmetric), 0);
        EXPECT_NE(handle, nullptr);
    }
    int differ = 0;
    {
        const auto options = floats(here.rank);
        const auto given = at::from_blob(block, {elements}, options);
        const auto sum = at::from_blob(static_cast<float*>(block) + elements, {elements}, options);
        auto input = at::zeros({elements}, options);
        cudaDeviceSynchronize();
        auto graph = capture(arena, stream.stream(), [&] {
            given.copy_(input * 3 - 1);
            EXPECT_EQ(nccl.all_reduce(given.data_ptr(), sum.data_ptr(), elements, nccl_float,
                                      nccl_sum, here.comm, stream.stream()),
                      0);
        });
        EXPECT_EQ(graph.report().retained_bytes, 0U);
        // Uses the pages of the graph's own blocks between its replays.
        auto neighbour =
            capture(arena, stream.stream(), [&] { static_cast<void>(input * -5 + 7); });
        at::manual_seed(17 + here.rank);
        const c10::cuda::CUDAStreamGuard guard(stream);
        for (int round = 0; round < rounds; ++round) {
            input.normal_();
            graph.replay(stream.stream());
            neighbour.replay(stream.stream());
            const auto expected = input * 3 - 1;
            EXPECT_EQ(nccl.all_reduce(expected.data_ptr(), expected.data_ptr(), elements,
                                      nccl_float, nccl_sum, here.comm, stream.stream()),
                      0);
            differ += !at::equal(sum, expected);
        }
        stream.synchronize();
    }
    if (as == As::buffer) {
        EXPECT_EQ(nccl.deregister(here.comm, handle), 0);
    } else if (as == As::window) {
        EXPECT_EQ(nccl.deregister_window(here.comm, handle), 0);
    }
    arena.free_exclusive(block);
    return differ;
}

// Started by the test below.
TEST(ExclusiveRank, Run) {
    if (rank_here() < 0) {
        GTEST_SKIP() << "a part of Exclusive.BlocksThatNcclKnowsServeCapturedCollectives";
    }
    const Rank here;
    vmmgraph::DeviceOptions options;
    options.driver = vmmgraph::DriverChoice::cuda;
    options.device = here.rank;
    options.sharing = vmmgraph::Sharing::fd;
    const auto device = vmmgraph::Device::open(options);
    // A window over pages without shareable handles would hang all ranks.
    ASSERT_EQ(device.info().sharing, VMMGRAPH_SHARING_FD);
    SharedVmmAllocator arena(device);
    const auto stream =
        c10::cuda::getStreamFromPool(true, static_cast<c10::DeviceIndex>(here.rank));
    for (const As as : {As::nothing, As::buffer, As::window}) {
        const int differ = differing(here, arena, stream, as);
        if (differ < 0) {
            std::printf("RESULT exclusive, rank %d: this NCCL knows no %s\n", here.rank, name(as));
            continue;
        }
        EXPECT_EQ(differ, 0) << name(as);
        std::printf("RESULT exclusive, rank %d: %s, %d rounds, %d differ\n", here.rank, name(as),
                    rounds, differ);
        EXPECT_EQ(arena.stats().exclusive_bytes, 0U);
    }
}

using Exclusive = TwoGpus;

TEST_F(Exclusive, BlocksThatNcclKnowsServeCapturedCollectives) { run_ranks("ExclusiveRank.Run"); }

}  // namespace
}  // namespace torch_tests
