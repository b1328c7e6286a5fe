#include <optional>
#include <string>
#include <utility>

#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUGraph.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <vmmgraph/torch_npu.hpp>

#include "../torch/undo.hpp"
#include "blocks.hpp"

namespace vmmgraph::torch_npu {
namespace {

using torch::attempt;
using torch::refuse;

// Parsed from the statistics: the C interface only reports a device handle's number.
c10::DeviceIndex device_of(const SharedVmmAllocator& arena) {
    const auto stats = arena.stats_json();
    const std::string npu = "{\"driver\":\"ascend\",\"device\":";
    if (stats.compare(0, npu.size(), npu) != 0) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot capture into the arena: its device is not one of the ascend driver; make "
               "the arena on an NPU");
    }
    return static_cast<c10::DeviceIndex>(std::stoi(stats.substr(npu.size(), 9)));
}

class OnDevice {
public:
    explicit OnDevice(c10::DeviceIndex device)
        : guard_(device), stream_(c10_npu::getCurrentNPUStream(device)) {}

    // Returns the stream after draining torch_npu's queue into it.
    [[nodiscard]] aclrtStream drained() const { return stream_.stream(); }
    [[nodiscard]] bool is_default() const {
        return stream_ == c10_npu::getDefaultNPUStream(stream_.device_index());
    }

private:
    c10_npu::NPUGuard guard_;
    c10_npu::NPUStream stream_;
};

// Returns true if a stream is under capture, also if the capture is invalidated.
bool is_capturing(aclrtStream stream) noexcept {
    aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    aclmdlRI model = nullptr;
    return aclmdlRICaptureGetInfo(stream, &status, &model) == ACL_SUCCESS &&
           status != ACL_MODEL_RI_CAPTURE_STATUS_NONE;
}

}  // namespace

const char* built_for() noexcept { return VMMGRAPH_TORCH_NPU_VERSION; }

struct CapturedGraph::State {
    c10::DeviceIndex device;
    std::shared_ptr<Memory> memory;
    std::unique_ptr<c10_npu::NPUGraph> graph = std::make_unique<c10_npu::NPUGraph>();
    SealReport report{};

    ~State() {
        // Destroy the graph first, which releases its pool. The memory lives as long as its tensors
        // and is unmapped after the arena's replays.
        graph.reset();
    }
};

CapturedGraph::CapturedGraph(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;
CapturedGraph::~CapturedGraph() = default;

CapturedGraph::State& CapturedGraph::state() const {
    if (!state_) {
        refuse(VMMGRAPH_ERROR_INVALID_HANDLE,
               "cannot use the graph: the object was moved from; use the object that was moved to");
    }
    return *state_;
}

void CapturedGraph::replay() {
    auto& own = state();
    const OnDevice current(own.device);
    // Drain before and after: the arena's own events bypass torch_npu's queue.
    own.memory->space.replay(current.drained(), [&] {
        own.graph->replay();
        static_cast<void>(current.drained());
    });
}

const SealReport& CapturedGraph::report() const { return state().report; }
const Space& CapturedGraph::space() const { return state().memory->space; }

struct CaptureScope::State {
    Retain retain;
    c10::MempoolId_t pool;
    std::unique_ptr<CapturedGraph::State> captured;
    std::optional<OnDevice> current;
    bool under_way = false;

    // Otherwise torch_npu's allocator would treat a lost capture as running.
    void forget() {
        namespace caching = c10_npu::NPUCachingAllocator;
        if (end_capture({captured->device, pool})) {
            caching::endAllocateToPool(captured->device, pool);
            caching::markCaptureEnd(captured->device);
            caching::releasePool(captured->device, pool);
        }
    }

    void abandon() noexcept {
        under_way = false;
        announce(nullptr);
        // The regular end also notifies the allocator. The constructor checked for other captures
        // of the stream.
        attempt([&] {
            if (is_capturing(current->drained())) {
                captured->graph->capture_end();
            }
        });
        attempt([&] { forget(); });
        attempt([&] { captured->graph->reset(); });
        captured->graph.reset();
        current.reset();
        attempt([&] {
            if (torch::seal_live_tensors(captured->memory->space)) {
                captured->memory->sealed.store(true, std::memory_order_release);
            }
        });
    }
};

CaptureScope::CaptureScope(SharedVmmAllocator& arena, const CaptureOptions& options) {
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot begin a capture: the allocator is not installed; call "
               "vmmgraph::torch_npu::install() first");
    }
    const auto device = device_of(arena);
    if (OnDevice(device).is_default()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot capture the stream: the default stream cannot be captured; make another "
               "stream torch_npu's current one");
    }
    auto space = arena.open_space();
    if (!options.label.empty()) {
        space.set_label(options.label);
    }
    auto captured = std::make_unique<CapturedGraph::State>();
    captured->device = device;
    captured->memory = std::make_shared<Memory>(std::move(space));
    state_.reset(
        new State{options.retain, c10_npu::graph_pool_handle(), std::move(captured), std::nullopt});
    state_->current.emplace(device);
    // Otherwise a failure below would end the stream's own capture.
    if (is_capturing(state_->current->drained())) {
        refuse(VMMGRAPH_ERROR_STREAM_CAPTURING,
               "cannot capture the stream: the stream is under capture; end that capture first");
    }
    state_->under_way = true;
    announce(state_->captured->memory);
    try {
        // THREAD_LOCAL, because other threads load kernels during the capture.
        state_->captured->graph->capture_begin(state_->pool,
                                               ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL);
    } catch (...) {
        state_->abandon();
        throw;
    }
    // The announcement is still pending only if torch_npu never asked this allocator.
    if (announced() != nullptr) {
        state_->abandon();
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture into the space: torch_npu began the capture with another allocator; "
               "install this allocator last");
    }
}

CaptureScope::~CaptureScope() {
    if (state_ && state_->under_way) {
        state_->abandon();
    }
}

CapturedGraph CaptureScope::end() {
    if (!state_ || !state_->under_way) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot end the capture: it has ended or failed; begin another CaptureScope");
    }
    auto& captured = *state_->captured;
    try {
        captured.graph->capture_end();
        captured.report = captured.memory->space.seal(state_->retain);
    } catch (...) {
        state_->abandon();
        throw;
    }
    captured.memory->sealed.store(true, std::memory_order_release);
    state_->under_way = false;
    state_->current.reset();
    return CapturedGraph(std::move(state_->captured));
}

}  // namespace vmmgraph::torch_npu
