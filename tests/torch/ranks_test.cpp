// Tensor-parallel decoder of 8 layers on two GPUs, one process each: graphs of 11 batches over one
// arena with peer pages. Runs with NCCL and with the all-reduce of examples/all_reduce; compared
// with eager runs and private pools.
#include "ranks_decoder.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <string_view>

#include "../../examples/all_reduce/neighbour.hpp"

namespace torch_tests {
namespace {

using all_reduce_example::Call;
using all_reduce_example::share_of;
using vmmgraph::torch::RemoteScope;

constexpr std::int64_t batches[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128};
constexpr int inputs = 4;
constexpr auto calls_of_a_graph = static_cast<std::size_t>(2 * RankDecoder::layers);

// One captured batch, in either kind of memory.
struct Captured {
    at::Tensor x, output;
    std::vector<Sum> sums;
    std::optional<CapturedGraph> graph;
    std::unique_ptr<at::cuda::CUDAGraph> alone;

    void replay(cudaStream_t stream) {
        if (graph) {
            graph->replay(stream);
        } else {
            alone->replay();
        }
    }
};

// Torch's own memory, opened through IPC handles.
class Opened {
public:
    explicit Opened(int socket) : socket_(socket) {}
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    ~Opened() {
        for (const auto& [handle, base] : bases_) {
            static_cast<void>(cudaIpcCloseMemHandle(base));
        }
    }

    // Returns the other rank's counterpart of `mine`.
    void* of(void* mine) {
        struct Message {
            cudaIpcMemHandle_t handle;
            std::uint64_t offset;
        } message{}, theirs{};
        CUdeviceptr base = 0;
        std::size_t bytes = 0;
        all_reduce_example::call(driver_, "cuMemGetAddressRange_v2", &base, &bytes,
                                 reinterpret_cast<CUdeviceptr>(mine));
        EXPECT_EQ(cudaIpcGetMemHandle(&message.handle, reinterpret_cast<void*>(base)), cudaSuccess);
        message.offset = reinterpret_cast<CUdeviceptr>(mine) - base;
        vmmgraph::send_descriptors(socket_, {}, &message, sizeof message);
        EXPECT_EQ(vmmgraph::receive_descriptors(socket_, &theirs, sizeof theirs).bytes,
                  sizeof theirs);
        std::vector<char> key(theirs.handle.reserved,
                              theirs.handle.reserved + sizeof theirs.handle.reserved);
        auto found = bases_.find(key);
        if (found == bases_.end()) {
            void* opened = nullptr;
            EXPECT_EQ(cudaIpcOpenMemHandle(&opened, theirs.handle, cudaIpcMemLazyEnablePeerAccess),
                      cudaSuccess);
            found = bases_.emplace(std::move(key), opened).first;
        }
        return static_cast<char*>(found->second) + theirs.offset;
    }

private:
    int socket_;
    void* driver_ = dlopen("libcuda.so.1", RTLD_NOW);
    std::map<std::vector<char>, void*> bases_;
};

class Part {
public:
    Part(const Rank& here, int socket, const std::string& kernel = all_reduce_example::source)
        : here_(here),
          device_(opened(here.rank)),
          arena_(device_),
          unmarked_(device_),
          neighbour_(device_, socket),
          ipc_(socket),
          decoder_(here.rank, *std::max_element(std::begin(batches), std::end(batches))),
          two_shot_(here.rank, 2, kernel.c_str()),
          streams_{c10::cuda::getStreamFromPool(true), c10::cuda::getStreamFromPool(true)},
          pad_(static_cast<unsigned*>(arena_.allocate_exclusive(all_reduce_example::pad_bytes))) {
        for (std::size_t i = 0; i < std::size(batches); ++i) {
            at::manual_seed(i);
            // Equal inputs on both ranks.
            given_.push_back((at::randn({inputs, batches[i], RankDecoder::hidden}, at::kFloat))
                                 .to(floats(here.rank).device()));
        }
        neighbour_.offer(vmmgraph::export_range(arena_, pad_, all_reduce_example::pad_bytes));
        eager();
    }

    // Captures both all-reduces, in the arena and in private pools.
    void capture_all() {
        for (const bool nccl : {true, false}) {
            for (const bool shared : {true, false}) {
                auto& all = captured_[way(nccl, shared)];
                auto& table = tables_[way(nccl, shared)];
                table = at::zeros({static_cast<std::int64_t>(std::size(batches) * calls_of_a_graph *
                                                             sizeof(Call))},
                                  floats(here_.rank).dtype(at::kByte));
                cudaDeviceSynchronize();
                for (std::size_t i = 0; i < std::size(batches); ++i) {
                    all.push_back(capture_one(
                        i, nccl, shared,
                        reinterpret_cast<Call*>(table.data_ptr()) + i * calls_of_a_graph));
                }
            }
        }
        introduce();
        // Cost of marks: the same captures unmarked, never replayed.
        std::vector<Captured> plain;
        for (std::size_t i = 0; i < std::size(batches); ++i) {
            Captured one{
                at::zeros({batches[i], RankDecoder::hidden}, floats(here_.rank)), {}, {}, {}, {}};
            cudaDeviceSynchronize();
            one.graph.emplace(capture(unmarked_, streams_[0].stream(), [&] {
                one.output = decoder_(one.x, [&](const auto& make) {
                    const auto input = make();
                    static_cast<void>(at::empty({share_of(input.numel(), 2)}, input.options()));
                    return at::empty_like(input);
                });
            }));
            plain.push_back(std::move(one));
        }
        marked_mib_ = static_cast<double>(arena_.stats().shared_bytes) / MiB;
        unmarked_mib_ = static_cast<double>(unmarked_.stats().shared_bytes) / MiB;
    }

    // Replays at random on two streams, in the same order on both ranks but with different delays.
    // Returns how many elements differ from eager results.
    std::int64_t wrong_of(int replays, bool nccl) {
        std::mt19937 common(nccl ? 1 : 2), own(100 + here_.rank);
        auto& all = captured_[way(nccl, true)];
        auto delay = at::empty({8 << 20}, floats(here_.rank));
        std::array<at::Tensor, 2> wrong;
        for (auto& each : wrong) {
            each = at::zeros({}, floats(here_.rank).dtype(at::kLong));
        }
        cudaDeviceSynchronize();
        for (int i = 0; i < replays; ++i) {
            const auto number = common() % all.size();
            const auto input = static_cast<std::int64_t>(common() % inputs);
            const auto turn = number % streams_.size();
            const c10::cuda::CUDAStreamGuard guard(streams_[turn]);
            if (own() % 8 == 0) {
                delay.fill_(i);
            }
            all[number].x.copy_(given_[number][input]);
            all[number].replay(streams_[turn].stream());
            wrong[turn] += at::ne(all[number].output, expected_[number][input]).sum();
        }
        cudaDeviceSynchronize();
        return wrong[0].item<std::int64_t>() + wrong[1].item<std::int64_t>();
    }

    // Microseconds of a replay by batch, alternating between both memories.
    std::array<std::vector<double>, 2> times(bool nccl) {
        constexpr int rounds = 15, replays = 20;
        std::array<std::vector<double>, 2> medians;
        const c10::cuda::CUDAStreamGuard guard(streams_[0]);
        cudaEvent_t from = nullptr, to = nullptr;
        EXPECT_EQ(cudaEventCreate(&from), cudaSuccess);
        EXPECT_EQ(cudaEventCreate(&to), cudaSuccess);
        for (std::size_t i = 0; i < std::size(batches); ++i) {
            std::array<std::vector<double>, 2> seen;
            for (int round = 0; round < 2 * rounds + 2; ++round) {
                // 0, 1, 1, 0: neither is always first. The first two warm up.
                const int memory = (round + round / 2) % 2;
                auto& one = captured_[way(nccl, memory == 0)][i];
                one.replay(streams_[0].stream());
                cudaEventRecord(from, streams_[0].stream());
                for (int k = 0; k < replays; ++k) {
                    one.replay(streams_[0].stream());
                }
                cudaEventRecord(to, streams_[0].stream());
                cudaEventSynchronize(to);
                float ms = 0;
                EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
                if (round >= 2) {
                    seen[memory].push_back(ms * 1e3 / replays);
                }
            }
            for (const int memory : {0, 1}) {
                std::sort(seen[memory].begin(), seen[memory].end());
                medians[memory].push_back(seen[memory][seen[memory].size() / 2]);
            }
        }
        cudaEventDestroy(from);
        cudaEventDestroy(to);
        return medians;
    }

    // Arena to private pools.
    static double ratio(const std::array<std::vector<double>, 2>& times) {
        const auto sum = [](const auto& of) { return std::accumulate(of.begin(), of.end(), 0.0); };
        return sum(times[0]) / sum(times[1]);
    }

    void print(const char* name, int replays, std::int64_t wrong,
               const std::array<std::vector<double>, 2>& times) const {
        std::vector<double> ratios;
        for (std::size_t i = 0; i < times[0].size(); ++i) {
            ratios.push_back(times[0][i] / times[1][i]);
        }
        const auto sum = [](const auto& of) { return std::accumulate(of.begin(), of.end(), 0.0); };
        std::printf(
            "RESULT ranks, %s, rank %d: %d replays, %lld elements wrong; a replay is %.3f of "
            "private pools' (%.3f to %.3f by batch; "
            "%.0f us for %.0f, of all 11)\n",
            name, here_.rank, replays, static_cast<long long>(wrong), ratio(times),
            *std::min_element(ratios.begin(), ratios.end()),
            *std::max_element(ratios.begin(), ratios.end()), sum(times[0]), sum(times[1]));
    }

    void print_memory() const {
        std::printf(
            "RESULT ranks, memory of 22 graphs with marks %.1f MiB, of 11 without %.1f MiB\n",
            marked_mib_, unmarked_mib_);
    }

    void end() {
        cudaDeviceSynchronize();
        neighbour_.meet();
        captured_ = {};
        arena_.free_exclusive(pad_);
    }

private:
    static std::size_t way(bool nccl, bool shared) { return (nccl ? 0 : 2) + (shared ? 0 : 1); }

    static vmmgraph::Device opened(int rank) {
        vmmgraph::DeviceOptions how;
        how.driver = vmmgraph::DriverChoice::cuda;
        how.device = rank;
        how.sharing = vmmgraph::Sharing::fd;
        return vmmgraph::Device::open(how);
    }

    at::Tensor by_nccl(const std::function<at::Tensor()>& make, cudaStream_t stream) const {
        const RemoteScope remote;
        const auto input = make();
        const auto sum = at::empty_like(input);
        EXPECT_EQ(here_.nccl.all_reduce(input.data_ptr(), sum.data_ptr(), input.numel(), nccl_float,
                                        nccl_sum, here_.comm, stream),
                  0);
        return sum;
    }

    void eager() {
        const c10::cuda::CUDAStreamGuard guard(streams_[0]);
        for (std::size_t i = 0; i < std::size(batches); ++i) {
            std::vector<at::Tensor> each;
            for (int k = 0; k < inputs; ++k) {
                each.push_back(decoder_(given_[i][k], [&](const auto& make) {
                    return by_nccl(make, streams_[0].stream());
                }));
            }
            expected_.push_back(at::stack(each));
        }
        cudaDeviceSynchronize();
    }

    Captured capture_one(std::size_t number, bool nccl, bool shared, const Call* calls) {
        Captured one{
            at::zeros({batches[number], RankDecoder::hidden}, floats(here_.rank)), {}, {}, {}, {}};
        cudaDeviceSynchronize();
        const auto stream = streams_[0].stream();
        const auto body = [&] {
            one.output = decoder_(one.x, [&](const std::function<at::Tensor()>& make) {
                if (nccl) {
                    return by_nccl(make, stream);
                }
                std::optional<RemoteScope> remote(std::in_place);
                const auto input = make();
                const auto part = at::empty({share_of(input.numel(), 2)}, input.options());
                remote.reset();
                const auto sum = at::empty_like(input);
                two_shot_.launch(calls + one.sums.size(), sum.data_ptr<float>(), input.numel(),
                                 stream);
                one.sums.push_back({input.data_ptr(), part.data_ptr(), input.numel()});
                return sum;
            });
        };
        if (shared) {
            CaptureOptions options;
            options.retain = Retain::shared_remote;
            one.graph.emplace(capture(arena_, stream, body, options));
            EXPECT_EQ(one.graph->report().remote_blocks, 0U);
        } else {
            const c10::cuda::CUDAStreamGuard guard(streams_[0]);
            one.alone = std::make_unique<at::cuda::CUDAGraph>();
            one.alone->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
            body();
            one.alone->capture_end();
        }
        return one;
    }

    // Gives the kernels both ranks' buffer addresses.
    void introduce() {
        std::map<std::pair<void*, std::int64_t>, std::size_t> ranges;
        const auto offer = [&](const Captured& of, void* at, std::int64_t elements) {
            // Exports shared buffers once.
            if (ranges.try_emplace({at, elements}, ranges.size() + 1).second) {
                neighbour_.offer(vmmgraph::export_range(
                    of.graph->space(), at, static_cast<std::size_t>(elements) * sizeof(float)));
            }
        };
        for (const auto& of : captured_[way(false, true)]) {
            for (const auto& sum : of.sums) {
                offer(of, sum.input, sum.elements);
                offer(of, sum.part, share_of(sum.elements, 2));
            }
        }
        const auto theirs = neighbour_.swap();
        std::map<void*, void*> native;
        for (const bool shared : {true, false}) {
            std::vector<Call> calls;
            for (const auto& of : captured_[way(false, shared)]) {
                EXPECT_EQ(of.sums.size(), calls_of_a_graph);
                for (const auto& sum : of.sums) {
                    const auto peers = [&](void* at, std::int64_t elements) {
                        return shared ? theirs.at(ranges.at({at, elements}))
                                      : native.try_emplace(at, nullptr).first->second;
                    };
                    if (!shared) {
                        for (void* const at : {sum.input, sum.part}) {
                            auto& known = native.try_emplace(at, nullptr).first->second;
                            known = known == nullptr ? ipc_.of(at) : known;
                        }
                    }
                    Call call{};
                    const int other = 1 - here_.rank;
                    call.pad[here_.rank] = pad_;
                    call.pad[other] = static_cast<unsigned*>(theirs[0]);
                    call.input[here_.rank] = static_cast<float*>(sum.input);
                    call.input[other] = static_cast<float*>(peers(sum.input, sum.elements));
                    call.part[here_.rank] = static_cast<float*>(sum.part);
                    call.part[other] =
                        static_cast<float*>(peers(sum.part, share_of(sum.elements, 2)));
                    calls.push_back(call);
                }
            }
            EXPECT_EQ(cudaMemcpy(tables_[way(false, shared)].data_ptr(), calls.data(),
                                 calls.size() * sizeof(Call), cudaMemcpyHostToDevice),
                      cudaSuccess);
        }
        neighbour_.meet();
    }

    const Rank& here_;
    vmmgraph::Device device_;
    SharedVmmAllocator arena_, unmarked_;
    all_reduce_example::Neighbour neighbour_;
    Opened ipc_;
    RankDecoder decoder_;
    all_reduce_example::TwoShot two_shot_;
    std::array<c10::cuda::CUDAStream, 2> streams_;
    // Arrival counts across replays; the peer may write at any time.
    unsigned* pad_;
    std::vector<at::Tensor> given_, expected_;
    std::array<std::vector<Captured>, 4> captured_;
    std::array<at::Tensor, 4> tables_;
    double marked_mib_ = 0, unmarked_mib_ = 0;
};

int socket_of(int rank) {
    return static_cast<int>(
        setting(rank == 0 ? "VMMGRAPH_TEST_SOCKET_0" : "VMMGRAPH_TEST_SOCKET_1", -1));
}

// Rank 1 reads late. Without the last barrier no rank waits for this read.
std::string late(bool meets) {
    std::string code = all_reduce_example::source;
    const auto swap = [&](std::string_view what, std::string_view by) {
        const auto at = code.find(what);
        EXPECT_NE(at, std::string::npos) << what;
        code.replace(at, what.size(), by);
    };
    swap("    // A block takes what",
         "    for (const long long from = clock64(); rank == 1 && clock64() - from < 600000;) {}\n "
         "   // A block takes what");
    if (!meets) {
        swap("    meet(call, rank, ranks);  // no part is read any more",
             "    // no part is read any more");
    }
    return code;
}

// Started by the tests below.
TEST(RanksDecoderRank, Run) {
    if (rank_here() < 0) {
        GTEST_SKIP() << "a part of RanksDecoder.*";
    }
    const int replays = static_cast<int>(setting("VMMGRAPH_RANKS_REPLAYS", 10'000));
    const Rank here;
    if (const char* const how = std::getenv("VMMGRAPH_RANKS_LATE")) {
        const bool meets = std::string_view(how) == "meets";
        Part part(here, socket_of(here.rank), late(meets));
        part.capture_all();
        const auto wrong = part.wrong_of(500, false);
        std::printf(
            "RESULT ranks, a peer that reads late, %s, rank %d: %lld elements wrong in 500 "
            "replays\n",
            meets ? "and is waited for" : "and nobody waits for it", here.rank,
            static_cast<long long>(wrong));
        part.end();
        // Rank 1 reads too late and gets wrong data.
        EXPECT_EQ(wrong != 0, !meets && here.rank == 1) << "the control, or the rule";
    } else {
        Part part(here, socket_of(here.rank));
        part.capture_all();
        for (const bool nccl : {true, false}) {
            const auto wrong = part.wrong_of(replays, nccl);
            EXPECT_EQ(wrong, 0);
            const auto times = part.times(nccl);
            part.print(nccl ? "NCCL" : "the example's all-reduce", replays, wrong, times);
            // NCCL registers the arena's memory but not torch's: the ratio would compare two NCCL
            // algorithms.
            if (std::getenv("NCCL_PROTO") == nullptr) {
                EXPECT_LT(Part::ratio(times), 1.03);
            }
        }
        part.print_memory();
        part.end();
    }
}

class RanksDecoder : public TwoGpus {
protected:
    void SetUp() override {
        TwoGpus::SetUp();
        if (IsSkipped()) {
            return;
        }
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets_), 0);
        setenv("VMMGRAPH_TEST_SOCKET_0", std::to_string(sockets_[0]).c_str(), 1);
        setenv("VMMGRAPH_TEST_SOCKET_1", std::to_string(sockets_[1]).c_str(), 1);
    }
    void TearDown() override {
        if (!IsSkipped()) {
            close(sockets_[0]);
            close(sockets_[1]);
        }
        TwoGpus::TearDown();
    }

private:
    int sockets_[2] = {-1, -1};
};

TEST_F(RanksDecoder, IsEagersBitForBitAndNoSlowerThanPrivatePools) {
    run_ranks("RanksDecoderRank.Run");
}

// NCCL registers captured buffers for this protocol only, and prefers another one for short sums.
TEST_F(RanksDecoder, IsEagersBitForBitWhereNcclHasRegisteredItsBuffers) {
    setenv("NCCL_PROTO", "Simple", 1);
    run_ranks("RanksDecoderRank.Run");
    unsetenv("NCCL_PROTO");
}

// The page's owner waits before another graph uses the page.
TEST_F(RanksDecoder, PeersThatReadLateAreRightIfTheyAreWaitedFor) {
    setenv("VMMGRAPH_RANKS_LATE", "meets", 1);
    run_ranks("RanksDecoderRank.Run");
    unsetenv("VMMGRAPH_RANKS_LATE");
}

TEST_F(RanksDecoder, AndWrongIfNobodyWaits) {
    setenv("VMMGRAPH_RANKS_LATE", "alone", 1);
    run_ranks("RanksDecoderRank.Run");
    unsetenv("VMMGRAPH_RANKS_LATE");
}

}  // namespace
}  // namespace torch_tests
