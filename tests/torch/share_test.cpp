// Outputs of captured graphs, read and written by another process on the same GPU and on a second
// one if present.
#include "fixture.hpp"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include <vmmgraph/lease.hpp>
#include <vmmgraph/region.hpp>
#include <vmmgraph/share.hpp>
#include <vmmgraph/torch_eager.hpp>

namespace torch_tests {
namespace {

using vmmgraph::Device;

constexpr const char* CHILD = "VMMGRAPH_TEST_CHILD";
constexpr std::int64_t count = 3 << 20;

vmmgraph::DeviceOptions shared(int device) {
    vmmgraph::DeviceOptions options;
    options.driver = vmmgraph::DriverChoice::cuda;
    options.device = device;
    options.sharing = vmmgraph::Sharing::fd;
    return options;
}

struct Part {
    std::uint64_t offset, bytes, page_bytes;
};

// Each message is the range's expected value. Replies with the mismatches, then negates the range.
int peer(int socket, int device) {
    try {
        if (cudaSetDevice(device) != cudaSuccess) {
            return 2;
        }
        std::array<Part, 64> parts{};
        const auto received = vmmgraph::receive_descriptors(socket, parts.data(), sizeof parts);
        const auto opened = Device::open(shared(device));
        std::vector<vmmgraph::PeerPage> pages;
        std::vector<vmmgraph::PeerExtent> extents;
        pages.reserve(received.descriptors.size());
        for (std::size_t i = 0; i < received.bytes / sizeof(Part); ++i) {
            pages.emplace_back(opened, received.descriptors[i].get(), parts[i].page_bytes);
            extents.push_back({&pages.back(), parts[i].offset, parts[i].bytes});
        }
        const vmmgraph::PeerMap map(opened, extents);
        std::vector<float> found(count);
        float expected = 0;
        while (vmmgraph::receive_descriptors(socket, &expected, sizeof expected).bytes ==
               sizeof expected) {
            std::int64_t wrong = 0;
            if (cudaMemcpy(found.data(), map.address(), count * sizeof(float),
                           cudaMemcpyDeviceToHost) != cudaSuccess) {
                return 3;
            }
            for (float& value : found) {
                wrong += value != expected;
                value = -expected;
            }
            if (cudaMemcpy(map.address(), found.data(), count * sizeof(float),
                           cudaMemcpyHostToDevice) != cudaSuccess ||
                cudaDeviceSynchronize() != cudaSuccess) {
                return 4;
            }
            vmmgraph::send_descriptors(socket, {}, &wrong, sizeof wrong);
        }
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "the other process: %s\n", error.what());
        return 5;
    }
}

class Other {
public:
    Other(const Device& device, int socket) : device_(device), socket_(socket) {}

    void give(const std::vector<vmmgraph::PageExtent>& range) {
        std::vector<Part> parts;
        std::vector<int> descriptors;
        for (const auto& extent : range) {
            exported_.try_emplace(extent.page, device_, extent.page);
            parts.push_back({extent.offset, extent.bytes, extent.page_bytes});
            descriptors.push_back(exported_.at(extent.page).descriptor());
        }
        vmmgraph::send_descriptors(socket_, descriptors, parts.data(), parts.size() * sizeof(Part));
    }
    // Returns the other process's mismatches. Negates the range.
    std::int64_t wrong(float expected) const {
        vmmgraph::send_descriptors(socket_, {}, &expected, sizeof expected);
        std::int64_t there = count;
        EXPECT_EQ(vmmgraph::receive_descriptors(socket_, &there, sizeof there).bytes, sizeof there);
        return there;
    }
    [[nodiscard]] std::size_t pages() const { return exported_.size(); }

private:
    const Device& device_;
    int socket_;
    std::map<std::uint64_t, vmmgraph::ExportedPage> exported_;
};

class Share : public Torch {
protected:
    static void run(int other, const char* test, void (*body)(int socket)) {
        if (const char* const number = std::getenv(CHILD)) {
            ASSERT_EQ(peer(std::atoi(number), other), 0);
            return;
        }
        std::array<int, 2> sockets{};
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            // A child must not use its parent's devices.
            static_cast<void>(close(sockets[0]));
            static_cast<void>(setenv(CHILD, std::to_string(sockets[1]).c_str(), 1));
            execl("/proc/self/exe", "share_test", (std::string("--gtest_filter=") + test).c_str(),
                  nullptr);
            _exit(9);
        }
        static_cast<void>(close(sockets[1]));
        {
            const vmmgraph::Descriptor socket(sockets[0]);
            body(socket.get());
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }

    static void rounds(int socket) {
        const auto device = Device::open(shared(0));
        ASSERT_EQ(device.info().sharing, VMMGRAPH_SHARING_FD);
        vmmgraph::ArenaOptions options;
        SharedVmmAllocator arena(device, options);
        const auto stream = c10::cuda::getStreamFromPool(true);
        auto* const raw = static_cast<void*>(stream.stream());
        CaptureOptions how;
        how.retain = Retain::own_pages;
        const auto single = at::TensorOptions().dtype(at::kFloat).device(at::kCUDA);
        auto input = at::zeros({count}, single), other = at::zeros({2 * count}, single);
        cudaDeviceSynchronize();
        at::Tensor output, unseen;
        std::optional<CapturedGraph> graph(
            capture(arena, raw, [&] { output = (input * 3 - input) + 1; }, how));
        auto neighbour = capture(arena, raw, [&] { unseen = (other * 5 - other) - 1; }, how);

        std::optional<Other> there(std::in_place, device, socket);
        there->give(vmmgraph::export_range(graph->space(), output.data_ptr(), output.nbytes()));
        std::int64_t wrong = 0, wrong_here = 0;
        for (int round = 1; round <= 60; ++round) {
            {
                const c10::cuda::CUDAStreamGuard guard(stream);
                input.fill_(round);
                other.fill_(-round);
            }
            graph->replay(raw);
            for (int i = 0; i <= round % 3; ++i) {
                neighbour.replay(raw);
            }
            cudaDeviceSynchronize();
            wrong += there->wrong(static_cast<float>(2 * round + 1));
            wrong_here += at::ne(output, -(2 * round + 1)).sum().item<std::int64_t>();
            wrong_here += at::ne(unseen, -4 * round - 1).sum().item<std::int64_t>();
        }
        EXPECT_THROW(vmmgraph::pause(arena), vmmgraph::Error)
            << "a page that another process has does not step aside";
        // The other process keeps the destroyed graph's pages from new owners.
        graph.reset();
        output.reset();
        arena.trim();
        auto next = capture(arena, raw, [&] { output = (input * 7 - input) + 2; }, how);
        next.replay(raw);
        cudaDeviceSynchronize();
        wrong += there->wrong(-(2.0F * 60 + 1));
        std::printf(
            "RESULT share: 61 rounds over %zu pages, %lld elements wrong there, %lld here\n",
            there->pages(), static_cast<long long>(wrong), static_cast<long long>(wrong_here));
        EXPECT_EQ(wrong, 0);
        EXPECT_EQ(wrong_here, 0);
        there.reset();
        EXPECT_EQ(device.stats().exported_bytes, 0U);
    }

    // A buffer on shared pages. The other process keeps its page from new owners.
    static void held(int socket) {
        constexpr std::uint64_t page = 16 << 20;
        auto device = Device::open(shared(0));
        SharedVmmAllocator arena(device);
        const auto stream = c10::cuda::getStreamFromPool(true);
        auto* const raw = static_cast<void*>(stream.stream());
        CaptureOptions how;
        how.retain = Retain::shared_remote;
        const auto single = at::TensorOptions().dtype(at::kFloat).device(at::kCUDA);
        const auto input = at::full({count}, 7, single), longer = at::ones({2 * count}, single);
        cudaDeviceSynchronize();
        at::Tensor output;
        void* buffer = nullptr;
        std::optional<CapturedGraph> graph(capture(
            arena, raw,
            [&] {
                std::optional<vmmgraph::torch::RemoteScope> remote(std::in_place);
                const at::Tensor sum = input * 3;
                remote.reset();
                buffer = sum.data_ptr();
                output = sum + 1;
            },
            how));
        EXPECT_EQ(graph->report().remote_blocks, 0U);
        // Not replayed: its pages may be lent.
        std::optional<CapturedGraph> idle(
            capture(arena, raw, [&] { static_cast<void>((longer * 5 - longer) - 1); }, how));

        std::optional<Other> there(std::in_place, device, socket);
        const auto range = vmmgraph::export_range(graph->space(), buffer, count * sizeof(float));
        EXPECT_EQ(range.size(), 1U) << "a remote block lies over no seam";
        there->give(range);
        graph->replay(raw);
        cudaDeviceSynchronize();
        float value = 21;
        const auto unchanged = [&](const char* after) {
            EXPECT_EQ(there->wrong(value), 0) << after;
            value = -value;
        };
        unchanged("a replay");
        EXPECT_TRUE(
            at::equal(at::from_blob(buffer, {count}, single), at::full({count}, -21, single)))
            << "it is not the same memory";

        EXPECT_THROW(vmmgraph::pause(arena), vmmgraph::Error);
        unchanged("a pause that was refused");

        const vmmgraph::ElasticBuffer elastic(device, 16 * page, {"borrowed", page, 0, 0});
        vmmgraph::Borrower borrower(
            [](const vmmgraph::Vacate&) { return std::optional(vmmgraph::Vacated{}); });
        std::optional<vmmgraph::Lease> lease;
        // The lendable bytes include small pages, which do not fit.
        std::uint64_t lent = vmmgraph::lendable(arena).first / page * page;
        while (lent > 0 && !lease) {
            try {
                lease.emplace(vmmgraph::lend(arena, elastic, 0, lent, borrower));
            } catch (const vmmgraph::Error& error) {
                EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT) << error.what();
                lent -= page;
            }
        }
        ASSERT_TRUE(lease) << "nothing was lent";
        lease->before(raw);
        ASSERT_EQ(cudaMemsetAsync(elastic.base(), 0x5a, lent, stream.stream()), cudaSuccess);
        cudaDeviceSynchronize();
        unchanged("a lease of the rest");
        lease->recall(std::chrono::seconds(10));

        {
            const vmmgraph::torch::EagerScope scope(arena, raw);
            static_cast<void>(at::full({4 * count}, -5, single) + at::full({4 * count}, 2, single));
        }
        cudaDeviceSynchronize();
        unchanged("eager work in the arena");

        arena.trim();
        unchanged("a trim");
        const auto held = device.stats().exported_bytes;
        EXPECT_EQ(held, page);

        output.reset();
        idle.reset();
        graph.reset();
        arena.trim();
        auto next = capture(arena, raw, [&] { output = (longer * 5 - longer) - 1; }, how);
        next.replay(raw);
        cudaDeviceSynchronize();
        unchanged("the graph's end, and another graph");
        device.trim();
        const auto before = device.stats().physical_bytes;
        there.reset();
        EXPECT_EQ(device.stats().exported_bytes, 0U);
        device.trim();
        EXPECT_EQ(device.stats().physical_bytes, before - page)
            << "the page counts until the other process has it no more";
        std::printf(
            "RESULT share: a page of %llu MiB was the other process's through a pause, a lease of "
            "%llu MiB, eager work, a trim and an "
            "end\n",
            static_cast<unsigned long long>(held >> 20),
            static_cast<unsigned long long>(lent >> 20));
    }

    static bool two_devices() {
        int devices = 0;
        EXPECT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
        if (devices < 2) {
            std::printf("SKIPPED: needs two GPUs that reach each other's memory\n");
        }
        return devices > 1;
    }
};

TEST_F(Share, WhatAGraphLeavesIsReadAndWrittenByAnotherProcess) {
    run(0, "Share.WhatAGraphLeavesIsReadAndWrittenByAnotherProcess", rounds);
}

TEST_F(Share, AndByOneOnAnotherDevice) {
    if (!two_devices()) {
        GTEST_SKIP();
    }
    run(1, "Share.AndByOneOnAnotherDevice", rounds);
}

TEST_F(Share, WhatAnotherProcessHasIsNobodyElses) {
    run(0, "Share.WhatAnotherProcessHasIsNobodyElses", held);
}

TEST_F(Share, NorWhatOneOnAnotherDeviceHas) {
    if (!two_devices()) {
        GTEST_SKIP();
    }
    run(1, "Share.NorWhatOneOnAnotherDeviceHas", held);
}

}  // namespace
}  // namespace torch_tests
