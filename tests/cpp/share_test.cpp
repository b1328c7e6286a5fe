// Pages of one process in another, through the C++ interface.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "host.hpp"
#include <vmmgraph/region.hpp>
#include <vmmgraph/share.hpp>

namespace {

using vmmgraph::Sharing;

constexpr const char* CHILD = "VMMGRAPH_TEST_CHILD";

vmmgraph::DeviceOptions shared(int device) {
    auto options = host::device_options(device);
    options.sharing = Sharing::fd;
    return options;
}

struct Part {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint64_t page_bytes;
};

// Imports pages, replies with the first byte, and overwrites the memory. Returns 0 on success.
int peer(int socket) {
    try {
        std::array<Part, 16> parts{};
        const auto received = vmmgraph::receive_descriptors(socket, parts.data(), sizeof parts);
        const auto device = vmmgraph::Device::open(shared(1));
        std::vector<vmmgraph::PeerPage> pages;
        std::vector<vmmgraph::PeerExtent> extents;
        pages.reserve(received.descriptors.size());
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < received.bytes / sizeof(Part); ++i) {
            pages.emplace_back(device, received.descriptors[i].get(), parts[i].page_bytes);
            extents.push_back({&pages.back(), parts[i].offset, parts[i].bytes});
            bytes += parts[i].bytes;
        }
        vmmgraph::PeerMap map(device, extents);
        map.used_by(nullptr);
        pages.clear();
        const bool right = host::holds(map.address(), bytes, 0x5a);
        host::fill(map.address(), bytes, 0xa5);
        const char done = 1;
        return right && vmmgraph::send_descriptors(socket, {}, &done, 1) == 1 ? 0 : 2;
    } catch (const std::exception&) {
        return 3;
    }
}

TEST(Share, OpeningSaysWhatWasGranted) {
    auto options = shared(5);
    options.sharing = Sharing::fabric;
    options.peers = 1U << 2 | 1U << 5;
    const auto device = vmmgraph::Device::open(options);
    EXPECT_EQ(device.info().sharing, static_cast<std::int32_t>(Sharing::fd));
    EXPECT_EQ(device.info().rdma, 0);
    EXPECT_EQ(device.info().peers, 1U << 2);
    vmmgraph::SharedVmmAllocator arena(device, host::options());
    void* const block = arena.allocate_exclusive(host::MiB);
    const auto page = vmmgraph::export_range(arena, block, host::MiB).front();
    EXPECT_THROW(static_cast<void>(vmmgraph::export_fabric(device, page.page)), vmmgraph::Error);
    EXPECT_THROW(vmmgraph::PeerPage(device, vmmgraph::FabricHandle{}, page.page_bytes),
                 vmmgraph::Error);
    EXPECT_EQ(device.stats().exported_bytes, 0U);
}

TEST(Share, AnExclusiveBlockIsOnePageThatIsZero) {
    const auto device = vmmgraph::Device::open(shared(0));
    vmmgraph::SharedVmmAllocator arena(device, host::options());
    void* block = arena.allocate_exclusive(3 * host::MiB, 4 * host::MiB);
    EXPECT_TRUE(host::holds(block, 4 * host::MiB, 0));
    const auto extents = vmmgraph::export_range(arena, block, 4 * host::MiB);
    ASSERT_EQ(extents.size(), 1U);
    EXPECT_EQ(extents.front().page_bytes, 4 * host::MiB);
    EXPECT_EQ(arena.stats().exclusive_bytes, 4 * host::MiB);
    EXPECT_GE(vmmgraph::ExportedPage(device, extents.front().page).descriptor(), 0);
    arena.free_exclusive(block);
    EXPECT_THROW(arena.free_exclusive(block), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(vmmgraph::export_range(arena, block, 1)), vmmgraph::Error);
}

TEST(Share, ASealExchangesNoPageOfARemoteBlock) {
    const auto device = vmmgraph::Device::open(shared(0));
    vmmgraph::SharedVmmAllocator arena(device, host::options());
    auto another = arena.open_space();
    another.free(another.allocate(host::MiB / 2));
    for (const bool remote : {true, false}) {
        auto space = arena.open_space();
        void* buffer =
            remote ? space.allocate_remote(host::MiB / 8) : space.allocate(host::MiB / 8);
        static_cast<void>(space.allocate(host::MiB / 8));
        const auto before = vmmgraph::export_range(space, buffer, host::MiB / 8);
        space.free(buffer);
        EXPECT_EQ(space.seal().remote_blocks, 0U);
        const auto after = vmmgraph::export_range(space, buffer, host::MiB / 8);
        ASSERT_EQ(before.size(), 1U);
        EXPECT_EQ(before.front().page == after.front().page, remote);
    }
    auto space = arena.open_space();
    static_cast<void>(space.allocate_remote(512));
    EXPECT_EQ(space.seal(vmmgraph::Retain::shared_remote).remote_bytes, 512U);
}

TEST(Share, AnotherProcessHasTheSameMemory) {
    if (const char* number = std::getenv(CHILD)) {
        EXPECT_EQ(peer(std::atoi(number)), 0);
        return;
    }
    std::array<int, 2> sockets{};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
    const std::string number = std::to_string(sockets[1]);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        // A child must not use its parent's devices.
        static_cast<void>(close(sockets[0]));
        static_cast<void>(setenv(CHILD, number.c_str(), 1));
        execl("/proc/self/exe", "share", "--gtest_filter=Share.AnotherProcessHasTheSameMemory",
              nullptr);
        _exit(4);
    }
    static_cast<void>(close(sockets[1]));
    const vmmgraph::Descriptor socket(sockets[0]);
    {
        const auto device = vmmgraph::Device::open(shared(0));
        EXPECT_EQ(device.info().sharing, VMMGRAPH_SHARING_FD);
        vmmgraph::SharedVmmAllocator arena(device, host::options());
        auto space = arena.open_space();
        constexpr std::size_t bytes = 3 * host::MiB;
        void* block = space.allocate(bytes);
        space.seal();
        auto* part = static_cast<unsigned char*>(block) + host::MiB / 2;
        const auto extents = vmmgraph::export_range(space, part, 2 * host::MiB);
        std::map<std::uint64_t, vmmgraph::ExportedPage> exported;
        std::vector<Part> parts;
        std::vector<int> descriptors;
        for (const auto& extent : extents) {
            exported.try_emplace(extent.page, device, extent.page);
            parts.push_back({extent.offset, extent.bytes, extent.page_bytes});
            descriptors.push_back(exported.at(extent.page).descriptor());
        }
        EXPECT_EQ(exported.size(), extents.size());
        EXPECT_GE(device.stats().exported_bytes, 2 * host::MiB);
        host::fill(block, bytes, 0x5a);
        vmmgraph::send_descriptors(socket.get(), descriptors, parts.data(),
                                   parts.size() * sizeof(Part));
        exported.begin()->second.close_descriptor();
        EXPECT_EQ(exported.begin()->second.descriptor(), -1);
        char done = 0;
        const auto answer = vmmgraph::receive_descriptors(socket.get(), &done, 1);
        EXPECT_EQ(answer.bytes, 1U);
        EXPECT_TRUE(host::holds(part, 2 * host::MiB, 0xa5));
        EXPECT_TRUE(host::holds(block, host::MiB / 2, 0x5a));
        EXPECT_THROW(vmmgraph::pause(arena), vmmgraph::Error);
        exported.clear();
        EXPECT_EQ(device.stats().exported_bytes, 0U);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Share, OpeningSaysWhatCannotBe) {
    const auto plain = vmmgraph::Device::open(host::device_options(5));
    EXPECT_EQ(plain.info().sharing, VMMGRAPH_SHARING_NONE);
    try {
        static_cast<void>(vmmgraph::Device::open(shared(5)));
        FAIL() << "a device that is open without was opened with";
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_DEVICE_IN_USE);
    }
    EXPECT_THROW(vmmgraph::ExportedPage(plain, 1), vmmgraph::Error);
    EXPECT_THROW(vmmgraph::PeerPage(plain, 0, host::MiB), vmmgraph::Error);
    EXPECT_THROW(vmmgraph::PeerMap(plain, {}), vmmgraph::Error);
    EXPECT_THROW(vmmgraph::PeerMap(plain, {vmmgraph::PeerExtent{}}), vmmgraph::Error);
}

}  // namespace
