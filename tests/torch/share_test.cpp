// What captured graphs leave, read and written by another process, on a GPU: that of the graphs, and another one where there are two. The other process
// is this program again.
#include "fixture.hpp"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include <vmmgraph/region.hpp>
#include <vmmgraph/share.hpp>

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

// Each message is a number that all of the range is to be; the answer is how many were not, and the range is the negative of it afterwards.
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
        while (vmmgraph::receive_descriptors(socket, &expected, sizeof expected).bytes == sizeof expected) {
            std::int64_t wrong = 0;
            if (cudaMemcpy(found.data(), map.address(), count * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess) {
                return 3;
            }
            for (float& value : found) {
                wrong += value != expected;
                value = -expected;
            }
            if (cudaMemcpy(map.address(), found.data(), count * sizeof(float), cudaMemcpyHostToDevice) != cudaSuccess ||
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

class Share : public Torch {
protected:
    static void run(int other, const char* filter) {
        if (const char* const number = std::getenv(CHILD)) {
            ASSERT_EQ(peer(std::atoi(number), other), 0);
            return;
        }
        std::array<int, 2> sockets{};
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            // This program again: a child must not use what its parent opened.
            static_cast<void>(close(sockets[0]));
            static_cast<void>(setenv(CHILD, std::to_string(sockets[1]).c_str(), 1));
            execl("/proc/self/exe", "share_test", filter, nullptr);
            _exit(9);
        }
        static_cast<void>(close(sockets[1]));
        {
            const vmmgraph::Descriptor socket(sockets[0]);
            rounds(socket.get());
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
        std::optional<CapturedGraph> graph(capture(arena, raw, [&] { output = (input * 3 - input) + 1; }, how));
        // It uses the same pages for what passes.
        auto neighbour = capture(arena, raw, [&] { unseen = (other * 5 - other) - 1; }, how);

        std::map<std::uint64_t, vmmgraph::ExportedPage> exported;
        std::vector<Part> parts;
        std::vector<int> descriptors;
        for (const auto& extent : vmmgraph::export_range(graph->space(), output.data_ptr(), output.nbytes())) {
            exported.try_emplace(extent.page, device, extent.page);
            parts.push_back({extent.offset, extent.bytes, extent.page_bytes});
            descriptors.push_back(exported.at(extent.page).descriptor());
        }
        vmmgraph::send_descriptors(socket, descriptors, parts.data(), parts.size() * sizeof(Part));
        std::int64_t wrong = 0, wrong_here = 0;
        const auto answered = [&](float expected) {
            vmmgraph::send_descriptors(socket, {}, &expected, sizeof expected);
            std::int64_t there = count;
            EXPECT_EQ(vmmgraph::receive_descriptors(socket, &there, sizeof there).bytes, sizeof there);
            wrong += there;
        };
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
            answered(static_cast<float>(2 * round + 1));
            // The other process has written since.
            wrong_here += at::ne(output, -(2 * round + 1)).sum().item<std::int64_t>();
            wrong_here += at::ne(unseen, -4 * round - 1).sum().item<std::int64_t>();
        }
        EXPECT_THROW(vmmgraph::pause(arena), vmmgraph::Error) << "a page that another process has does not step aside";
        // The graph goes, and its memory stays the other process's: nobody else gets the pages.
        graph.reset();
        output.reset();
        arena.trim();
        auto next = capture(arena, raw, [&] { output = (input * 7 - input) + 2; }, how);
        next.replay(raw);
        cudaDeviceSynchronize();
        answered(-(2.0F * 60 + 1));
        std::printf("RESULT share: 61 rounds over %zu pages, %lld elements wrong there, %lld here\n", exported.size(),
                    static_cast<long long>(wrong), static_cast<long long>(wrong_here));
        EXPECT_EQ(wrong, 0);
        EXPECT_EQ(wrong_here, 0);
        exported.clear();
        EXPECT_EQ(device.stats().exported_bytes, 0U);
    }
};

TEST_F(Share, WhatAGraphLeavesIsReadAndWrittenByAnotherProcess) {
    run(0, "--gtest_filter=Share.WhatAGraphLeavesIsReadAndWrittenByAnotherProcess");
}

TEST_F(Share, AndByOneOnAnotherDevice) {
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    if (devices < 2) {
        std::printf("SKIPPED: needs two GPUs that reach each other's memory\n");
        GTEST_SKIP();
    }
    run(1, "--gtest_filter=Share.AndByOneOnAnotherDevice");
}

}  // namespace
}  // namespace torch_tests
