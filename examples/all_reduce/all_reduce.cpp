// Two processes on two GPUs. Their captured graphs compute sums by reading each other's graph
// memory.
//
//   all_reduce_example [REPLAYS]     10,000; exit status 1 if a sum is wrong, 77 without two GPUs
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vmmgraph/torch.hpp>

#include "neighbour.hpp"
#include "two_shot.hpp"

extern char** environ;

namespace {

using all_reduce_example::Call;
using all_reduce_example::share_of;

constexpr int ranks = 2;
// Floats per sum: in a slab, with uneven shares, one page, more than one page.
constexpr std::array<std::int64_t, 6> counts{1 << 10, 4 * 1001, 1 << 16, 5 << 18, 9 << 18, 5 << 20};

// A graph that sums data of both ranks, with the buffers accessed by the peer.
struct Shape {
    at::Tensor base[ranks], factor, output;
    void* input = nullptr;
    void* part = nullptr;
    std::optional<vmmgraph::torch::CapturedGraph> graph;
};

void capture(Shape& shape, const Call* call, int rank, const all_reduce_example::TwoShot& sum,
             vmmgraph::SharedVmmAllocator& arena, cudaStream_t stream) {
    const auto& mine = shape.base[rank];
    vmmgraph::torch::CaptureOptions options;
    // All buffers accessed by peers are marked; outputs are not.
    options.retain = vmmgraph::Retain::shared_remote;
    const auto body = [&] {
        std::optional<vmmgraph::torch::RemoteScope> remote(std::in_place);
        // The peer reads these two. Between replays all graphs share their memory.
        const at::Tensor input = mine * shape.factor;
        const at::Tensor part = at::empty({share_of(mine.numel(), ranks)}, mine.options());
        remote.reset();
        shape.input = input.data_ptr();
        shape.part = part.data_ptr();
        const auto reduced = at::empty_like(mine);
        sum.launch(call, reduced.data_ptr<float>(), mine.numel(), stream);
        shape.output = reduced + mine;
    };
    shape.graph.emplace(vmmgraph::torch::capture(arena, stream, body, options));
}

// Replays in random order. Returns the number of elements different from a local sum.
std::int64_t replay(std::vector<Shape>& shapes, const std::array<c10::cuda::CUDAStream, 2>& streams,
                    int rank, int replays) {
    std::mt19937 common(1), own(100 + rank);
    const auto options = shapes[0].factor.options();
    auto delay = at::empty({8 << 20}, options);
    std::array<at::Tensor, 2> wrong{at::zeros({}, options.dtype(at::kLong)),
                                    at::zeros({}, options.dtype(at::kLong))};
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < replays; ++i) {
        const auto number = common() % shapes.size();
        const auto turn = number % streams.size();
        const double factors[ranks] = {common() % 1000 / 64.0, common() % 1000 / -32.0};
        auto& shape = shapes[number];
        // One stream per graph, so its factor is not changed during a replay.
        const c10::cuda::CUDAStreamGuard guard(streams[turn]);
        if (own() % 8 == 0) {
            delay.fill_(i);
        }
        shape.factor.fill_(factors[rank]);
        shape.graph->replay(streams[turn].stream());
        const auto expected =
            shape.base[0] * factors[0] + shape.base[1] * factors[1] + shape.base[rank];
        wrong[turn] += at::ne(shape.output, expected).sum();
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return wrong[0].item<std::int64_t>() + wrong[1].item<std::int64_t>();
}

int run(int rank, int socket, int replays) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(rank));
    vmmgraph::torch::install();
    vmmgraph::DeviceOptions opening;
    opening.driver = vmmgraph::DriverChoice::cuda;
    opening.device = rank;
    opening.sharing = vmmgraph::Sharing::fd;
    const auto device = vmmgraph::Device::open(opening);
    vmmgraph::SharedVmmAllocator arena(device);
    const all_reduce_example::TwoShot sum(rank, ranks);
    const auto options = at::TensorOptions()
                             .dtype(at::kFloat)
                             .device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const std::array<c10::cuda::CUDAStream, 2> streams{c10::cuda::getStreamFromPool(),
                                                       c10::cuda::getStreamFromPool()};
    all_reduce_example::Neighbour neighbour(device, socket);
    // Counts arrivals across replays, and peers write at any time: must not be graph memory.
    auto* const pad =
        static_cast<unsigned*>(arena.allocate_exclusive(all_reduce_example::pad_bytes));
    neighbour.offer(vmmgraph::export_range(arena, pad, all_reduce_example::pad_bytes));
    std::vector<Shape> shapes(counts.size());
    std::vector<Call> calls(shapes.size());
    const auto table = at::zeros({static_cast<std::int64_t>(calls.size() * sizeof(Call))},
                                 options.dtype(at::kByte));
    auto* const on_device = reinterpret_cast<Call*>(table.data_ptr());
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        at::manual_seed(i);
        for (auto& base : shapes[i].base) {
            base = at::randn({counts[i]}, at::kFloat).to(options.device());
        }
        shapes[i].factor = at::zeros({1}, options);
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        capture(shapes[i], on_device + i, rank, sum, arena, streams[0].stream());
        const auto& space = shapes[i].graph->space();
        neighbour.offer(vmmgraph::export_range(space, shapes[i].input, counts[i] * sizeof(float)));
        neighbour.offer(vmmgraph::export_range(space, shapes[i].part,
                                               share_of(counts[i], ranks) * sizeof(float)));
    }
    const auto theirs = neighbour.swap();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        for (int other = 0; other < ranks; ++other) {
            const bool here = other == rank;
            calls[i].pad[other] = here ? pad : static_cast<unsigned*>(theirs[0]);
            calls[i].input[other] = static_cast<float*>(here ? shapes[i].input : theirs[1 + 2 * i]);
            calls[i].part[other] = static_cast<float*>(here ? shapes[i].part : theirs[2 + 2 * i]);
        }
    }
    C10_CUDA_CHECK(
        cudaMemcpy(on_device, calls.data(), calls.size() * sizeof(Call), cudaMemcpyHostToDevice));
    neighbour.meet();
    const auto wrong = replay(shapes, streams, rank, replays);
    std::printf("rank %d: %d replays of %zu graphs over %.1f MiB, %lld elements wrong\n", rank,
                replays, shapes.size(), static_cast<double>(arena.stats().shared_bytes) / (1 << 20),
                static_cast<long long>(wrong));
    // The peer may still read the memory until both are done.
    neighbour.meet();
    shapes.clear();
    arena.free_exclusive(pad);
    return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    // Ends the process if it hangs.
    alarm(240);
    try {
        const int replays = argc > 1 ? std::atoi(argv[1]) : 10'000;
        if (argc == 3) {
            return run(1, std::atoi(argv[2]), replays);
        }
        if (c10::cuda::device_count() < ranks) {
            std::printf("SKIPPED: needs two GPUs that reach each other's memory\n");
            return 77;
        }
        int sockets[2] = {-1, -1};
        socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets);
        std::string count = std::to_string(replays), socket = std::to_string(sockets[1]);
        char* const arguments[] = {argv[0], count.data(), socket.data(), nullptr};
        pid_t child = 0;
        if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) != 0) {
            throw std::runtime_error("the second rank does not start");
        }
        close(sockets[1]);
        const bool here = run(0, sockets[0], replays) == 0;
        int there = 1;
        waitpid(child, &there, 0);
        std::printf(here && there == 0 ? "passed\n" : "failed\n");
        return here && there == 0 ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
