// Page sharing between processes in the C interface: all caller errors.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vmmgraph/vmmgraph.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t MiB = 1 << 20;

vmmgraph_device_options_t shared_options(std::int32_t number) {
    auto options = small_device(number);
    options.sharing = VMMGRAPH_SHARING_FD;
    return options;
}

class HostileShare : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;
    void* block = nullptr;

    void SetUp() override {
        const auto options = shared_options(6);
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        auto pages = sized<vmmgraph_arena_options_t>();
        pages.small_page_bytes = 64 << 10;
        pages.large_page_bytes = MiB;
        ASSERT_EQ(vmmgraph_arena_create(device, &pages, &arena), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_open(arena, &space), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_allocate(space, 2 * MiB, nullptr, &block), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
    }

    void TearDown() override {
        ASSERT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_device_trim(device, nullptr), VMMGRAPH_OK);
        auto stats = sized<vmmgraph_device_stats_t>();
        ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
        EXPECT_EQ(stats.physical_bytes, 0U);
        EXPECT_EQ(stats.exported_bytes, 0U);
        EXPECT_EQ(stats.pending, 0U);
        ASSERT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    }

    std::vector<vmmgraph_page_extent_t> extents() {
        std::vector<vmmgraph_page_extent_t> found(8);
        std::size_t count = 0;
        EXPECT_EQ(vmmgraph_space_export(space, block, 2 * MiB, found.data(), found.size(), &count),
                  VMMGRAPH_OK);
        found.resize(count);
        return found;
    }
};

TEST_F(HostileShare, HandlesThatAreNone) {
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
                                      reinterpret_cast<std::uint64_t>(arena)}) {
        std::size_t count = 0;
        int fd = -1;
        vmmgraph_peer_page_t page = nullptr;
        vmmgraph_peer_map_t map = nullptr;
        void* address = nullptr;
        const auto none = garbage<vmmgraph_device_t>(value);
        EXPECT_EQ(
            vmmgraph_space_export(garbage<vmmgraph_space_t>(value), block, 1, nullptr, 0, &count),
            VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_device_export_page(none, 1, &fd), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_device_page_exported(none, 1, 1), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_device_import(none, 0, MiB, &page), VMMGRAPH_ERROR_INVALID_HANDLE);
        vmmgraph_fabric_handle_t fabric{};
        EXPECT_EQ(vmmgraph_device_export_fabric(none, 1, &fabric), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_device_import_fabric(none, &fabric, MiB, &page),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_peer_page_close(garbage<vmmgraph_peer_page_t>(value)),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_peer_map_create(none, nullptr, 0, &map, &address),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        const vmmgraph_peer_extent_t extent = {garbage<vmmgraph_peer_page_t>(value), 0, MiB};
        EXPECT_EQ(vmmgraph_peer_map_create(device, &extent, 1, &map, &address),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_peer_map_used_by(garbage<vmmgraph_peer_map_t>(value), nullptr),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_peer_map_destroy(garbage<vmmgraph_peer_map_t>(value)),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(fd, -1);
        EXPECT_EQ(page, nullptr);
        EXPECT_EQ(map, nullptr);
    }
}

TEST_F(HostileShare, ExclusiveBlocksOfNoArenaAndNoSize) {
    void* exclusive = nullptr;
    std::size_t count = 77;
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
                                      reinterpret_cast<std::uint64_t>(space)}) {
        const auto none = garbage<vmmgraph_arena_t>(value);
        EXPECT_EQ(vmmgraph_arena_allocate_exclusive(none, MiB, 0, &exclusive),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_free_exclusive(none, block), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_export(none, block, 1, nullptr, 0, &count),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    EXPECT_EQ(vmmgraph_arena_allocate_exclusive(arena, MiB, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, ~std::uint64_t{0}, (std::uint64_t{1} << 46) + 1}) {
        EXPECT_EQ(vmmgraph_arena_allocate_exclusive(arena, bytes, 0, &exclusive),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    for (const std::uint64_t granularity :
         {std::uint64_t{1}, std::uint64_t{2048}, std::uint64_t{12288}, ~std::uint64_t{0}}) {
        EXPECT_EQ(vmmgraph_arena_allocate_exclusive(arena, MiB, granularity, &exclusive),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    EXPECT_EQ(vmmgraph_arena_allocate_exclusive(arena, 65 * MiB, 0, &exclusive),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(exclusive, nullptr);
    EXPECT_EQ(vmmgraph_arena_free_exclusive(arena, block), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_arena_export(arena, block, 1, nullptr, 0, &count),
              VMMGRAPH_ERROR_FOREIGN_POINTER);
    ASSERT_EQ(vmmgraph_arena_allocate_exclusive(arena, 5000, 128 << 10, &exclusive), VMMGRAPH_OK);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(exclusive) % (128 << 10), 0U);
    EXPECT_EQ(vmmgraph_space_free(space, exclusive), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_arena_deallocate(arena, exclusive), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_arena_export(arena, exclusive, 0, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_export(arena, exclusive, ~std::uint64_t{0}, nullptr, 0, &count),
              VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_arena_export(arena, exclusive, 1, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(count, 77U);
    EXPECT_EQ(vmmgraph_arena_export(arena, exclusive, 128 << 10, nullptr, 0, &count), VMMGRAPH_OK);
    EXPECT_EQ(count, 1U);
    auto stats = sized<vmmgraph_arena_stats_t>();
    ASSERT_EQ(vmmgraph_arena_stats(arena, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.exclusive_bytes, 128U << 10);
    ASSERT_EQ(vmmgraph_arena_free_exclusive(arena, exclusive), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_free_exclusive(arena, exclusive), VMMGRAPH_ERROR_FOREIGN_POINTER);
    ASSERT_EQ(vmmgraph_arena_allocate_exclusive(arena, MiB, 0, &exclusive), VMMGRAPH_OK);
}

TEST_F(HostileShare, RemoteBlocksThatCannotBe) {
    void* remote = nullptr;
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
                                      reinterpret_cast<std::uint64_t>(arena)}) {
        EXPECT_EQ(
            vmmgraph_space_allocate_remote(garbage<vmmgraph_space_t>(value), 1, nullptr, &remote),
            VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    EXPECT_EQ(vmmgraph_space_allocate_remote(space, 1, nullptr, &remote),
              VMMGRAPH_ERROR_WRONG_STATE);
    vmmgraph_space_t open = nullptr;
    ASSERT_EQ(vmmgraph_space_open(arena, &open), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_allocate_remote(open, 1, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, ~std::uint64_t{0}, (std::uint64_t{1} << 46) + 1}) {
        EXPECT_EQ(vmmgraph_space_allocate_remote(open, bytes, nullptr, &remote),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    EXPECT_EQ(vmmgraph_space_allocate_remote(open, 65 * MiB, nullptr, &remote),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    vmmgraph_space_t bump = nullptr;
    ASSERT_EQ(vmmgraph_space_open_bump(arena, &bump), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_allocate_remote(bump, MiB, nullptr, &remote),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(remote, nullptr);
    EXPECT_EQ(vmmgraph_space_destroy(bump), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_space_allocate_remote(open, MiB + 1, nullptr, &remote), VMMGRAPH_OK);
    auto report = sized<vmmgraph_seal_report_t>();
    ASSERT_EQ(vmmgraph_space_seal(open, VMMGRAPH_RETAIN_SHARED_REMOTE, &report), VMMGRAPH_OK);
    EXPECT_EQ(report.remote_blocks, 1U);
    EXPECT_EQ(report.remote_bytes, 2 * MiB) << "whole pages";
    EXPECT_EQ(report.retained_bytes, 0U);
    EXPECT_EQ(vmmgraph_space_destroy(open), VMMGRAPH_OK);
}

TEST_F(HostileShare, PointersThatAreNull) {
    std::size_t count = 0;
    EXPECT_EQ(vmmgraph_space_export(space, block, 1, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_export(space, block, 1, nullptr, 1, &count),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    const std::uint64_t page = extents().front().page;
    EXPECT_EQ(vmmgraph_device_export_page(device, page, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    int fd = -1;
    ASSERT_EQ(vmmgraph_device_export_page(device, page, &fd), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_import(device, fd, MiB, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_export_fabric(device, page, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    vmmgraph_fabric_handle_t fabric{};
    vmmgraph_peer_page_t imported = nullptr;
    EXPECT_EQ(vmmgraph_device_import_fabric(device, nullptr, MiB, &imported),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_import_fabric(device, &fabric, MiB, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    // The host driver has no fabric handles. The descriptor holds one pin.
    EXPECT_EQ(vmmgraph_device_export_fabric(device, page, &fabric), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_device_import_fabric(device, &fabric, MiB, &imported),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, -2), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(imported, nullptr);
    vmmgraph_peer_map_t map = nullptr;
    void* address = nullptr;
    const vmmgraph_peer_extent_t extent = {nullptr, 0, MiB};
    EXPECT_EQ(vmmgraph_peer_map_create(device, nullptr, 1, &map, &address),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_peer_map_create(device, &extent, 1, nullptr, &address),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_peer_map_create(device, &extent, 1, &map, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    char byte = 0;
    std::uint64_t received = 0;
    EXPECT_EQ(vmmgraph_send_descriptors(fd, nullptr, 1, &byte, 1, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_send_descriptors(fd, nullptr, 0, nullptr, 1, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(fd, nullptr, 1, &received, nullptr, 0, &count),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(fd, &byte, 1, nullptr, nullptr, 0, &count),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(fd, &byte, 1, &received, nullptr, 1, &count),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(fd, &byte, 1, &received, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(close(fd), 0);
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, -1), VMMGRAPH_OK);
}

TEST_F(HostileShare, RangesAndPagesThatAreNone) {
    std::size_t count = 77;
    EXPECT_EQ(vmmgraph_space_export(space, nullptr, 1, nullptr, 0, &count),
              VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_space_export(space, block, 0, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_export(space, block, UINT64_MAX, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(count, 77U);
    // Independent of the buffer size.
    ASSERT_EQ(vmmgraph_space_export(space, block, 2 * MiB, nullptr, 0, &count), VMMGRAPH_OK);
    EXPECT_EQ(count, 2U);
    std::array<vmmgraph_page_extent_t, 2> one{};
    ASSERT_EQ(vmmgraph_space_export(space, block, 2 * MiB, one.data(), 1, &count), VMMGRAPH_OK);
    EXPECT_EQ(count, 2U);
    EXPECT_NE(one[0].page, 0U);
    EXPECT_EQ(one[0].address, block);
    EXPECT_EQ(one[0].page_bytes, MiB);
    EXPECT_EQ(one[1].page, 0U);

    int fd = -1;
    for (const std::uint64_t number :
         {std::uint64_t{0}, std::uint64_t{1}, UINT64_MAX, one[0].page ^ std::uint64_t{1} << 40}) {
        EXPECT_EQ(vmmgraph_device_export_page(device, number, &fd), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        EXPECT_EQ(vmmgraph_device_page_exported(device, number, 1), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        EXPECT_EQ(vmmgraph_device_page_exported(device, number, -1),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
    }
    EXPECT_EQ(fd, -1);
}

// Never negative.
TEST_F(HostileShare, PinsThatAreNotThere) {
    const std::uint64_t page = extents().front().page;
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, 0), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, -1), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    ASSERT_EQ(vmmgraph_device_page_exported(device, page, 3), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, -4), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, INT32_MIN),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    auto stats = sized<vmmgraph_device_stats_t>();
    ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.exported_bytes, MiB);
    EXPECT_EQ(vmmgraph_arena_pause(arena, nullptr, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message().find("other processes"), std::string::npos) << last_message();
    EXPECT_EQ(vmmgraph_device_page_exported(device, page, -3), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_pause(arena, nullptr, nullptr), VMMGRAPH_OK);
    int fd = -1;
    EXPECT_EQ(vmmgraph_device_export_page(device, page, &fd), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_arena_resume(arena, 0, nullptr), VMMGRAPH_OK);
}

// Closing releases them.
TEST(HostileShareDevice, PinsOfAClosedDevice) {
    const auto options = shared_options(7);
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;
    void* block = nullptr;
    ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_arena_create(device, nullptr, &arena), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_space_open(arena, &space), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_space_allocate(space, MiB, nullptr, &block), VMMGRAPH_OK);
    vmmgraph_page_extent_t extent{};
    std::size_t count = 0;
    ASSERT_EQ(vmmgraph_space_export(space, block, MiB, &extent, 1, &count), VMMGRAPH_OK);
    int fd = -1;
    ASSERT_EQ(vmmgraph_device_export_page(device, extent.page, &fd), VMMGRAPH_OK);
    std::memset(block, 9, MiB);
    EXPECT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    // The descriptor keeps the memory alive.
    const auto again = shared_options(7);
    ASSERT_EQ(vmmgraph_device_open(&again, &device), VMMGRAPH_OK);
    auto stats = sized<vmmgraph_device_stats_t>();
    ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.physical_bytes, 0U);
    vmmgraph_peer_page_t page = nullptr;
    ASSERT_EQ(vmmgraph_device_import(device, fd, extent.page_bytes, &page), VMMGRAPH_OK);
    vmmgraph_peer_map_t map = nullptr;
    void* address = nullptr;
    const vmmgraph_peer_extent_t part = {page, extent.offset, extent.bytes};
    ASSERT_EQ(vmmgraph_peer_map_create(device, &part, 1, &map, &address), VMMGRAPH_OK);
    EXPECT_EQ(static_cast<const unsigned char*>(address)[MiB - 1], 9);
    EXPECT_EQ(vmmgraph_peer_map_used_by(map, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_peer_page_close(page), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_peer_page_close(page), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_peer_map_destroy(map), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_peer_map_destroy(map), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    EXPECT_EQ(close(fd), 0);
}

TEST_F(HostileShare, ImportsAndPartsThatAreNone) {
    const auto extent = extents().front();
    int fd = -1;
    ASSERT_EQ(vmmgraph_device_export_page(device, extent.page, &fd), VMMGRAPH_OK);
    vmmgraph_peer_page_t page = nullptr;
    for (const int wrong : {-1, INT32_MIN}) {
        EXPECT_EQ(vmmgraph_device_import(device, wrong, MiB, &page),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    std::array<int, 2> sockets{};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
    EXPECT_EQ(vmmgraph_device_import(device, sockets[0], MiB, &page), VMMGRAPH_ERROR_DRIVER);
    EXPECT_EQ(vmmgraph_device_import(device, fd, 2 * MiB, &page), VMMGRAPH_ERROR_DRIVER);
    for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, UINT64_MAX}) {
        EXPECT_EQ(vmmgraph_device_import(device, fd, bytes, &page), VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
    }
    EXPECT_EQ(page, nullptr);
    ASSERT_EQ(vmmgraph_device_import(device, fd, MiB, &page), VMMGRAPH_OK);
    vmmgraph_peer_map_t map = nullptr;
    void* address = nullptr;
    EXPECT_EQ(vmmgraph_peer_map_create(device, nullptr, 0, &map, &address),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const std::array<vmmgraph_peer_extent_t, 2> parts = {{{page, 0, 4096}, {page, 0, MiB}}};
    EXPECT_EQ(vmmgraph_peer_map_create(device, parts.data(), 2, &map, &address),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const vmmgraph_peer_extent_t beyond = {page, UINT64_MAX, 2};
    EXPECT_EQ(vmmgraph_peer_map_create(device, &beyond, 1, &map, &address),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_peer_map_create(device, parts.data(), SIZE_MAX, &map, &address),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(map, nullptr);
    EXPECT_EQ(address, nullptr);

    // Descriptors beyond the buffer are closed.
    char byte = 7;
    std::uint64_t moved = 0;
    std::size_t count = 5;
    const std::array<int, 3> fds = {fd, fd, fd};
    ASSERT_EQ(vmmgraph_send_descriptors(sockets[0], fds.data(), fds.size(), &byte, 1, &moved),
              VMMGRAPH_OK);
    EXPECT_EQ(moved, 1U);
    int got = -1;
    ASSERT_EQ(vmmgraph_receive_descriptors(sockets[1], &byte, 1, &moved, &got, 1, &count),
              VMMGRAPH_OK);
    EXPECT_EQ(moved, 1U);
    EXPECT_EQ(count, 1U);
    EXPECT_EQ(close(got), 0);
    const int wrong = -1;
    EXPECT_EQ(vmmgraph_send_descriptors(sockets[0], &wrong, 1, &byte, 1, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_send_descriptors(-1, nullptr, 0, &byte, 1, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_send_descriptors(fd, nullptr, 0, &byte, 1, nullptr), VMMGRAPH_ERROR_DRIVER);
    EXPECT_EQ(vmmgraph_send_descriptors(sockets[0], nullptr, 0, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(-1, &byte, 1, &moved, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_receive_descriptors(sockets[1], nullptr, 0, &moved, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(close(sockets[0]), 0);
    EXPECT_EQ(vmmgraph_receive_descriptors(sockets[1], &byte, 1, &moved, nullptr, 0, &count),
              VMMGRAPH_OK);
    EXPECT_EQ(moved, 0U);
    EXPECT_EQ(close(sockets[1]), 0);
    EXPECT_EQ(vmmgraph_peer_page_close(page), VMMGRAPH_OK);
    EXPECT_EQ(close(fd), 0);
    EXPECT_EQ(vmmgraph_device_page_exported(device, extent.page, -1), VMMGRAPH_OK);
}

TEST(HostileShareDevice, OptionsThatAreNone) {
    vmmgraph_device_t device = nullptr;
    for (const std::int32_t sharing : {-1, 3, INT32_MAX}) {
        auto options = shared_options(7);
        options.sharing = sharing;
        EXPECT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << sharing;
    }
    auto options = shared_options(7);
    for (const std::int32_t rdma : {2, -1}) {
        options.rdma = rdma;
        EXPECT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_ERROR_INVALID_ARGUMENT) << rdma;
    }
    EXPECT_EQ(device, nullptr);
}

}  // namespace
