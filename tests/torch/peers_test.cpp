// Access of a second GPU to pages of the first. Needs two GPUs.
#include "fixture.hpp"

#include <cuda.h>
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string_view>

extern char** environ;

namespace torch_tests {
namespace {

// Asks the driver.
bool has_access(int device, const void* at) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    auto* const ask = reinterpret_cast<decltype(&cuMemGetAccess)>(
        library == nullptr ? nullptr : dlsym(library, "cuMemGetAccess"));
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    unsigned long long flags = 0;
    EXPECT_NE(ask, nullptr);
    EXPECT_EQ(ask(&flags, &location, reinterpret_cast<CUdeviceptr>(at)), CUDA_SUCCESS);
    return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

// The same memory as a tensor of the second device.
at::Tensor seen_from_the_second(const at::Tensor& tensor) {
    const c10::Device second(c10::kCUDA, 1);
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .options(tensor.options().device(second))
        .target_device(second)
        .make_tensor();
}

bool two_that_reach_each_other() {
    int can = 0;
    return c10::cuda::device_count() >= 2 && cudaDeviceCanAccessPeer(&can, 1, 0) == cudaSuccess &&
           can != 0;
}

void expect_shared_by_both(const at::Tensor& output) {
    EXPECT_TRUE(has_access(0, output.const_data_ptr()));
    EXPECT_TRUE(has_access(1, output.const_data_ptr()));
    const auto first = output.cpu();
    {
        const c10::cuda::CUDAGuard second(1);
        const auto seen = seen_from_the_second(output);
        EXPECT_TRUE(at::equal(seen.clone().cpu(), first));
        seen.add_(1);
        cudaDeviceSynchronize();
    }
    EXPECT_TRUE(at::equal(output.cpu(), first + 1));
    EXPECT_TRUE(at::equal(output.to(c10::Device(c10::kCUDA, 1)).cpu(), first + 1));
}

}  // namespace

TEST_F(Torch, AnArenasPeersUseWhatACaptureLeaves) {
    if (!two_that_reach_each_other()) {
        GTEST_SKIP() << "SKIPPED: needs two GPUs that reach each other's memory";
    }
    vmmgraph::Options options;
    options.peers = 1U << 1;
    SharedVmmAllocator arena(0, options);
    const auto input = at::randn({1024, 1024}, half());
    at::Tensor output, small;
    auto graph = capture(arena, raw(), [&] {
        output = input * 2;
        small = output.narrow(0, 0, 1) + 1;
    });
    graph.replay(raw());
    cudaDeviceSynchronize();
    expect_shared_by_both(output);
    expect_shared_by_both(small);
}

TEST_F(Torch, PeersOfRemoteBlocksHaveNothingElse) {
    if (!two_that_reach_each_other()) {
        GTEST_SKIP() << "SKIPPED: needs two GPUs that reach each other's memory";
    }
    vmmgraph::Options options;
    options.remote_peers = 1U << 1;
    SharedVmmAllocator arena(0, options);
    const auto input = at::randn({1024, 1024}, half());
    at::Tensor marked, plain;
    auto graph = capture(arena, raw(), [&] {
        {
            const vmmgraph::torch::RemoteScope remote;
            marked = input * 2;
        }
        plain = marked + 1;
    });
    graph.replay(raw());
    cudaDeviceSynchronize();
    expect_shared_by_both(marked);
    EXPECT_TRUE(has_access(0, plain.const_data_ptr()));
    EXPECT_FALSE(has_access(1, plain.const_data_ptr()));
}

// A separate process, because the failure destroys its context.
TEST_F(Torch, WhoIsNoPeerReadsNothing) {
    if (!two_that_reach_each_other()) {
        GTEST_SKIP() << "SKIPPED: needs two GPUs that reach each other's memory";
    }
    if (std::getenv("VMMGRAPH_TEST_NO_PEER") != nullptr) {
        SharedVmmAllocator arena(0);
        const auto input = at::randn({1024, 1024}, half());
        at::Tensor output;
        auto graph = capture(arena, raw(), [&] { output = input * 2; });
        graph.replay(raw());
        cudaDeviceSynchronize();
        cudaError_t error = cudaErrorUnknown;
        try {
            const c10::cuda::CUDAGuard second(1);
            const auto read = seen_from_the_second(output) + 1;
            error = cudaDeviceSynchronize();
        } catch (const std::exception& thrown) {
            error = std::string_view(thrown.what()).find("illegal memory access") ==
                            std::string_view::npos
                        ? cudaErrorUnknown
                        : cudaErrorIllegalAddress;
        }
        std::_Exit(error == cudaErrorIllegalAddress ? 0 : 1);
    }
    setenv("VMMGRAPH_TEST_NO_PEER", "1", 1);
    char* const arguments[] = {const_cast<char*>("torch_test"),
                               const_cast<char*>("--gtest_filter=Torch.WhoIsNoPeerReadsNothing"),
                               nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ), 0);
    unsetenv("VMMGRAPH_TEST_NO_PEER");
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// Like torch before its first copy between two devices.
TEST_F(Torch, APeerThatTorchAdmitsUsesEveryArena) {
    if (!two_that_reach_each_other()) {
        GTEST_SKIP() << "SKIPPED: needs two GPUs that reach each other's memory";
    }
    const auto input = at::randn({1024, 1024}, half());
    std::vector<at::Tensor> outputs;
    std::vector<CapturedGraph> graphs;
    SharedVmmAllocator before(0), after(0);
    for (auto* const arena : {&before, &after}) {
        if (arena == &after) {
            c10::cuda::CUDACachingAllocator::get()->enablePeerAccess(1, 0);
        }
        auto& output = outputs.emplace_back();
        graphs.push_back(capture(*arena, raw(), [&] { output = input * 3; }));
        graphs.back().replay(raw());
        cudaDeviceSynchronize();
    }
    for (const auto& output : outputs) {
        expect_shared_by_both(output);
    }
}

}  // namespace torch_tests
