// Refusals and messages of torch_c.h, without a GPU.
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_c.h>

#include "../cpp/host.hpp"

namespace {

template <class T>
T sized() {
    T value{};
    value.struct_size = sizeof(T);
    return value;
}

std::string last_message() {
    std::size_t needed = 0;
    EXPECT_EQ(vmmgraph_torch_last_error_message(nullptr, 0, &needed), VMMGRAPH_OK);
    std::vector<char> text(needed);
    EXPECT_EQ(vmmgraph_torch_last_error_message(text.data(), text.size(), nullptr), VMMGRAPH_OK);
    return text.data();
}

TEST(TorchC, NamesItsRelease) { EXPECT_STREQ(vmmgraph_torch_built_for(), TORCH_VERSION); }

TEST(TorchC, NoHandleIsTrusted) {
    // Null, a small value, an unknown handle, and a pointer.
    int something = 0;
    for (const auto raw : {std::uintptr_t{0}, std::uintptr_t{1}, std::uintptr_t{0x76000010},
                           reinterpret_cast<std::uintptr_t>(&something)}) {
        const auto group = reinterpret_cast<vmmgraph_torch_group_t>(raw);
        vmmgraph_space_t space = nullptr;
        const auto graph = sized<vmmgraph_torch_graph_t>();
        auto captured = sized<vmmgraph_torch_captured_t>();
        auto difference = sized<vmmgraph_difference_t>();
        for (const auto status : {
                 vmmgraph_torch_group_space(group, &space),
                 vmmgraph_torch_capture_begin(group, 0, 1, 0),
                 vmmgraph_torch_capture_begun(group),
                 vmmgraph_torch_capture_end(group, &graph, &captured),
                 vmmgraph_torch_capture_abandon(group, 0, 1),
                 vmmgraph_torch_group_seal(group, VMMGRAPH_RETAIN_DEFAULT, nullptr),
                 vmmgraph_torch_group_seal_unwritten(group, nullptr),
                 vmmgraph_torch_replay(group, 0),
                 vmmgraph_torch_launched_by_hand(group),
                 vmmgraph_torch_verify(group, 0, nullptr, 0, &difference),
                 vmmgraph_torch_drop(group, 0),
                 vmmgraph_torch_keep(group, 0),
                 vmmgraph_torch_group_instantiate(group, nullptr),
                 vmmgraph_torch_group_close(group),
             }) {
            EXPECT_EQ(status, VMMGRAPH_ERROR_INVALID_HANDLE);
            EXPECT_NE(last_message(), "");
        }
        EXPECT_EQ(space, nullptr);
        const auto arena = reinterpret_cast<vmmgraph_arena_t>(raw);
        vmmgraph_torch_group_t opened = nullptr;
        EXPECT_EQ(vmmgraph_torch_group_open(arena, &opened), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(opened, nullptr);
        auto stats = sized<vmmgraph_torch_executables_t>();
        EXPECT_EQ(vmmgraph_torch_executable_stats(arena, &stats), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_torch_set_executable_limits(arena, 1, 0), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_torch_evict_executables(arena), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_torch_eager_enter(arena), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_torch_eager_enter_of(arena, 1), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_torch_eager_end(arena), VMMGRAPH_ERROR_WRONG_STATE);
        EXPECT_EQ(vmmgraph_torch_eager_leave_of(arena), VMMGRAPH_OK);
    }
}

TEST(TorchC, AnArenaOfTheHostDriverHasNoGraphGroups) {
    vmmgraph::SharedVmmAllocator arena(0, host::options());
    vmmgraph_torch_group_t group = nullptr;
    EXPECT_EQ(vmmgraph_torch_group_open(arena.handle(), &group), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(last_message().find("host driver"), std::string::npos) << last_message();
    EXPECT_EQ(group, nullptr);
    EXPECT_EQ(vmmgraph_torch_group_open(arena.handle(), nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    auto stats = sized<vmmgraph_torch_executables_t>();
    EXPECT_EQ(vmmgraph_torch_executable_stats(arena.handle(), nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    stats.struct_size = 8;
    EXPECT_EQ(vmmgraph_torch_executable_stats(arena.handle(), &stats), VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_TRUE(arena.is_initialized());
}

TEST(TorchC, ScopesOfRemoteBlocksAreOfTheirThreadAndEndOnce) {
    using vmmgraph::torch::RemoteScope;
    EXPECT_EQ(vmmgraph_torch_remote_leave(), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message(), "");
    EXPECT_EQ(vmmgraph_torch_remote_enter(), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_torch_remote_enter(), VMMGRAPH_OK);
    EXPECT_TRUE(RemoteScope::active());
    std::thread([] {
        EXPECT_FALSE(RemoteScope::active());
        EXPECT_EQ(vmmgraph_torch_remote_leave(), VMMGRAPH_ERROR_WRONG_STATE);
        // A scope left open ends with its thread.
        EXPECT_EQ(vmmgraph_torch_remote_enter(), VMMGRAPH_OK);
    }).join();
    EXPECT_EQ(vmmgraph_torch_remote_leave(), VMMGRAPH_OK);
    EXPECT_TRUE(RemoteScope::active());
    EXPECT_EQ(vmmgraph_torch_remote_leave(), VMMGRAPH_OK);
    EXPECT_FALSE(RemoteScope::active());
    EXPECT_EQ(vmmgraph_torch_remote_leave(), VMMGRAPH_ERROR_WRONG_STATE);
}

TEST(TorchC, EagerScopesOfTheHostDriverAndThoseOfNobodyAreRefused) {
    vmmgraph::SharedVmmAllocator arena(0, host::options());
    EXPECT_EQ(vmmgraph_torch_eager_leave(), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message(), "");
    EXPECT_EQ(vmmgraph_torch_eager_enter(arena.handle()), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(last_message().find("host driver"), std::string::npos) << last_message();
    EXPECT_EQ(vmmgraph_torch_eager_enter_of(arena.handle(), 1 << 20),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_torch_eager_leave(), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message().find("the arena has none"), std::string::npos) << last_message();
    EXPECT_TRUE(arena.is_initialized());
}

TEST(TorchC, APoolIsEmptiedBehindTheInstallation) {
    for (const auto device : {-1, 128, 1 << 20}) {
        EXPECT_EQ(vmmgraph_torch_pool_empty(device, 0, 1), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(vmmgraph_torch_pool_empty(0, 0, 1), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message().find("install"), std::string::npos) << last_message();
}

TEST(TorchC, AMessageIsOfItsThreadAndOfTheLastCall) {
    EXPECT_EQ(vmmgraph_torch_group_close(nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
    const auto here = last_message();
    EXPECT_NE(here, "");
    std::thread([] { EXPECT_EQ(last_message(), ""); }).join();
    EXPECT_EQ(last_message(), here);
    char some[5];
    std::memset(some, 'x', sizeof(some));
    std::size_t needed = 0;
    EXPECT_EQ(vmmgraph_torch_last_error_message(some, sizeof(some), &needed), VMMGRAPH_OK);
    EXPECT_EQ(needed, here.size() + 1);
    EXPECT_EQ(std::string(some), here.substr(0, 4));
    EXPECT_EQ(vmmgraph_torch_uninstall(), VMMGRAPH_OK);
    EXPECT_EQ(last_message(), "");
    EXPECT_EQ(vmmgraph_torch_installed(), 0);
}

TEST(TorchC, AnAdoptedArenaIsOwnedAndOneThatWasReleasedIsNot) {
    vmmgraph::SharedVmmAllocator made(0, host::options());
    auto* const handle = made.release();
    EXPECT_FALSE(made.is_initialized());
    {
        const auto adopted = vmmgraph::SharedVmmAllocator::adopt(handle);
        EXPECT_TRUE(adopted.is_initialized());
    }
    EXPECT_EQ(vmmgraph_arena_destroy(handle), VMMGRAPH_ERROR_INVALID_HANDLE);
}

}  // namespace
