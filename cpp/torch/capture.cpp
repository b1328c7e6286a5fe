#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>

#include "block_allocator.hpp"

namespace at::cuda {
// ATen/cuda/CUDAContextLight.h, which would pull in cuBLAS, cuSPARSE and cuSOLVER headers.
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// The MemPool route's allocator: one for each space. Torch asks it for segments and gives them back when the pool goes.
class VMMTorchAllocator final : public ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
public:
    explicit VMMTorchAllocator(const std::shared_ptr<Memory>& memory)
        // The callbacks own the memory, so that a late raw_delete is good whatever was destroyed before.
        : CUDAPluggableAllocator([memory](std::size_t bytes, int, cudaStream_t stream) { return memory->allocate(bytes, stream); },
                                 [memory](void* segment, std::size_t, int, cudaStream_t) {
                                     static_cast<void>(memory->release(segment));
                                 }) {}
    std::string name() override { return "vmmgraph"; }
};

// Pools that could not be destroyed because a capture was under way: torch asserts in the destructor then (2.6 to 2.12).
struct Graveyard {
    std::mutex mutex;
    std::vector<std::unique_ptr<at::cuda::MemPool>> pools;
};

Graveyard& graveyard() {
    // Never destroyed, like torch's own pools.
    static auto* const instance = new Graveyard;
    return *instance;
}

std::atomic<int> captures{0};

void bury(std::unique_ptr<at::cuda::MemPool> pool) {
    std::vector<std::unique_ptr<at::cuda::MemPool>> ready;
    {
        auto& waiting = graveyard();
        const std::lock_guard lock(waiting.mutex);
        if (pool) {
            waiting.pools.push_back(std::move(pool));
        }
        if (captures.load() == 0) {
            ready.swap(waiting.pools);
        }
    }
}

[[noreturn]] void refuse(vmmgraph_status_t status, const std::string& why) {
    auto info = detail::sized<ErrorInfo>();
    info.status = status;
    info.device = -1;
    throw Error("vmmgraph: " + why, info);
}

}  // namespace

const char* built_for() noexcept { return TORCH_VERSION; }

struct CapturedGraph::State {
    c10::DeviceIndex device;
    Space space;
    std::shared_ptr<Memory> memory;
    std::unique_ptr<at::cuda::MemPool> pool;
    std::unique_ptr<at::cuda::CUDAGraph> graph;
    SealReport report;

    ~State() {
        // The graph first: it releases its pool. Then the pool, which gives its segments back. The space last, which waits for its
        // replays before it unmaps. Destroying an executable graph whose last launch still runs is allowed.
        graph.reset();
        bury(std::move(pool));
    }
};

CapturedGraph::CapturedGraph(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;
CapturedGraph::~CapturedGraph() = default;

void CapturedGraph::replay(void* stream) {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), state_->device));
    state_->space.replay(stream, [this] { state_->graph->replay(); });
}

const SealReport& CapturedGraph::report() const noexcept { return state_->report; }
const Space& CapturedGraph::space() const noexcept { return state_->space; }
void* CapturedGraph::exec() const { return state_->graph->raw_cuda_graph_exec(); }

struct CaptureScope::State {
    CaptureOptions options;
    c10::cuda::CUDAStream stream;
    c10::MempoolId_t pool_id;
    std::unique_ptr<CapturedGraph::State> captured;
    std::optional<c10::cuda::CUDAStreamGuard> guard;
    int uses_before = 0;
    bool under_way = false;

    // The shared pages of the MemPool route and of the share policy must not hold what cuBLAS keeps for later captures.
    bool clears_workspaces() const { return options.route == Route::mempool || options.retain == Retain::shared_pages; }

    void leave() noexcept {
        if (under_way) {
            under_way = false;
            captures.fetch_sub(1);
        }
        guard.reset();
    }

    // Ends a capture that failed, so that torch and the arena go on.
    void abandon_capture() noexcept {
        auto& graph = captured->graph;
        bool ended = false;
        try {
            // As long as the capture is intact this is the orderly way, and the only one that resets torch's generators.
            graph->capture_end();
            ended = true;
        } catch (...) {
        }
        if (!ended) {
            cudaGraph_t partial = nullptr;
            cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
            if (cudaStreamIsCapturing(stream.stream(), &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
                static_cast<void>(cudaStreamEndCapture(stream.stream(), &partial));
            }
            if (partial != nullptr) {
                static_cast<void>(cudaGraphDestroy(partial));
            }
            // Torch checks for a sticky error at its next allocation.
            static_cast<void>(cudaGetLastError());
        }
        try {
            graph.reset();
            if (options.route == Route::blocks) {
                abandon(captured->device, pool_id);
            } else if (captured->pool->use_count() > uses_before) {
                try {
                    caching::endAllocateToPool(captured->device, pool_id);
                } catch (...) {
                    // It had ended already.
                }
                caching::releasePool(captured->device, pool_id);
            }
            if (clears_workspaces()) {
                at::cuda::clearCublasWorkspaces();
            }
        } catch (...) {
            // Nothing more can be done in a destructor; the next capture begins with its own space.
        }
    }
};

CaptureScope::CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options) {
    if (stream == nullptr) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "the default stream cannot be captured");
    }
    if (options.route == Route::mempool && options.retain == Retain::own_pages) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "the MemPool route shares its segments: it cannot give live blocks pages of their own");
    }
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    if (options.route == Route::blocks && !installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "call vmmgraph::torch::install() before a capture by the blocks route");
    }
    const auto device = c10::cuda::current_device();
    const auto torch_stream = c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device);
    auto space = arena.open_space();
    auto memory = std::make_shared<Memory>(space);
    auto captured = std::unique_ptr<CapturedGraph::State>(
        new CapturedGraph::State{device, std::move(space), memory, nullptr, std::make_unique<at::cuda::CUDAGraph>(), {}});
    state_.reset(new State{options, torch_stream, {0, 0}, std::move(captured), std::nullopt});
    bury(nullptr);
    if (state_->clears_workspaces()) {
        at::cuda::clearCublasWorkspaces();
    }
    state_->guard.emplace(torch_stream);
    if (options.route == Route::mempool) {
        state_->captured->pool = std::make_unique<at::cuda::MemPool>(std::make_shared<VMMTorchAllocator>(memory));
        state_->pool_id = state_->captured->pool->id();
        state_->uses_before = state_->captured->pool->use_count();
    } else {
        state_->pool_id = at::cuda::graph_pool_handle();
    }
    captures.fetch_add(1);
    state_->under_way = true;
    try {
        std::optional<Announcement> announcement;
        if (options.route == Route::blocks) {
            announcement.emplace(memory);
        }
        state_->captured->graph->capture_begin(state_->pool_id, cudaStreamCaptureModeThreadLocal);
    } catch (...) {
        state_->abandon_capture();
        state_->leave();
        throw;
    }
}

CaptureScope::~CaptureScope() {
    if (state_ && state_->under_way) {
        state_->abandon_capture();
        state_->leave();
    }
}

CapturedGraph CaptureScope::end() {
    if (!state_ || !state_->under_way) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "the capture has ended already");
    }
    // If this throws, the destructor abandons the capture.
    state_->captured->graph->capture_end();
    state_->leave();
    if (state_->clears_workspaces()) {
        at::cuda::clearCublasWorkspaces();
    }
    auto& captured = *state_->captured;
    captured.report = captured.space.seal(state_->options.route == Route::mempool ? Retain::shared_pages : state_->options.retain);
    return CapturedGraph(std::move(state_->captured));
}

}  // namespace vmmgraph::torch
