#include <algorithm>
#include <string>
#include <utility>

#include <torch/version.h>
#include <vmmgraph/torch_region.hpp>

#include "block_allocator.hpp"
#include "guards.hpp"
#include "mark_behind.hpp"
#include "nodes.hpp"
#include "session.hpp"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Returns true if torch has a segment for the pool, from any allocator.
bool holds_memory(compat::PoolId pool) {
    for (const auto& segment : caching::snapshot().segments) {
        if (segment.owner_private_pool_id == pool) {
            return true;
        }
    }
    return false;
}

}  // namespace

const char* built_for() noexcept { return TORCH_VERSION; }

struct CapturedGraph::State {
    CaptureSession session;
    // One graph per piece; the last one is null after an abandoned capture.
    std::vector<std::unique_ptr<compat::Graph>> pieces;
    std::size_t memset_kernels = 0;
    std::optional<RingGraph> ring;

    State(SharedVmmAllocator& arena, Route route, std::shared_ptr<ExecutablePool> executables)
        : session(arena, route, std::move(executables)) {
        pieces.push_back(std::make_unique<compat::Graph>());
    }

    OnStream on(void* stream) const { return OnStream(session.device(), stream); }

    // Launches all pieces in order on torch's current stream; `between` runs after each but the
    // last.
    void launch(const OnStream& current, const std::function<void(std::size_t)>& between) {
        auto* const stream = current.stream().stream();
        session.launched_on(current.stream());
        const Template::Launch executables(*session.executables());
        for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
            pieces[piece]->lend(executables.at(piece));
        }
        for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
            const auto launch = [&] { pieces[piece]->launch(stream); };
            // A step of a ring has one piece.
            if (ring) {
                ring->launch(executables.at(piece), stream, launch);
            } else {
                launch();
            }
            if (between && piece + 1 < pieces.size()) {
                between(piece);
                current.again();
            }
        }
    }

    ~State() {
        const OnDevice current(session.device());
        const Relaxed relaxed;
        session.cancel();
        // Programs often drop a graph's inputs with the graph, so wait for its replays, unless the
        // last stream is under capture.
        if (pieces.back()) {
            try {
                session.space().wait();
            } catch (const std::exception&) {
                session.leave_workspaces();
            }
        }
        // Order: the graphs release their pool, the pool returns its segments, and the space unmaps
        // its pages after its replays. Live tensors share ownership of the memory and keep their
        // pages.
        session.close_executables();
        ring.reset();
        pieces.back().reset();
        pieces.clear();
        session.bury_pool();
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

void CapturedGraph::replay(void* stream) { replay(stream, {}); }

void CapturedGraph::replay(void* stream, const std::function<void(std::size_t)>& between) {
    State& own = state();
    const auto current = own.on(stream);
    const MarkBehind marks(own.session.space(), current.stream());
    own.session.space().replay(stream, [&] { own.launch(current, between); });
}

Difference CapturedGraph::verify(void* stream, const std::vector<Output>& outputs) {
    State& own = state();
    const auto current = own.on(stream);
    const MarkBehind marks(own.session.space(), current.stream());
    return own.session.space().verify(stream, outputs, [&] { own.launch(current, {}); });
}

std::size_t CapturedGraph::pieces() const noexcept { return state_ ? state_->pieces.size() : 0; }
std::size_t CapturedGraph::memset_kernels() const noexcept {
    return state_ ? state_->memset_kernels : 0;
}
const SealReport& CapturedGraph::report() const { return state().session.report(); }
const Space& CapturedGraph::space() const { return state().session.space(); }

void* CapturedGraph::exec() const { return exec(state().pieces.size() - 1); }

void* CapturedGraph::exec(std::size_t piece) const {
    auto& own = state();
    if (piece >= own.pieces.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot return the executable of piece " +
                                                    std::to_string(piece) + ": the graph has " +
                                                    std::to_string(own.pieces.size()) +
                                                    " pieces, counted from 0; pass one of these");
    }
    own.session.executables()->pin();
    const Template::Launch executables(*own.session.executables());
    return executables.at(piece);
}

bool CapturedGraph::instantiate() { return state().session.executables()->instantiate(); }

void CapturedGraph::instantiate_soon() {
    if (const auto& graphs = state().session.executables(); !graphs->touch()) {
        graphs->pool()->state_->instantiator.ask(graphs);
    }
}

bool CapturedGraph::is_instantiated() const {
    return state().session.executables()->is_instantiated();
}
std::uint64_t CapturedGraph::executable_bytes() const {
    return state().session.executables()->bytes();
}
std::shared_ptr<ExecutablePool> CapturedGraph::executables() const {
    return state().session.executables()->pool();
}

struct CaptureScope::State {
    // Its ring is null unless the ring is being captured: outside its capture the ring may serve a
    // different one.
    CaptureOptions options;
    c10::cuda::CUDAStream stream;
    std::unique_ptr<CapturedGraph::State> captured;
    compat::PoolId pool{0, 0};
    bool begun = false;
    bool end_tried = false;
    // True if the caller sets kernel parameters in the executables. A new instantiation would lose
    // the parameters.
    bool pinned = false;

    static State& running(const std::unique_ptr<State>& state) {
        if (!state || !state->captured || !state->session().is_capturing() || state->end_tried) {
            refuse(
                VMMGRAPH_ERROR_WRONG_STATE,
                "cannot continue the capture: it has ended or failed; begin another CaptureScope");
        }
        return *state;
    }

    CaptureSession& session() { return captured->session; }
    std::unique_ptr<compat::Graph>& graph() { return captured->pieces.back(); }

    void begin_piece() {
        pool = session().begin_piece();
        std::optional<Announcement> announcement;
        if (options.route == Route::blocks) {
            announcement.emplace(session().memory());
        }
        for (const auto& generator : options.generators) {
            graph()->draw_from(*generator);
        }
        graph()->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
        begun = true;
        if (auto* const ring = std::exchange(options.ring, nullptr); ring != nullptr) {
            ring->capture_begin(stream.stream(), options.ring_capture);
            options.ring = ring;
        }
    }

    // At most once, and only after begin_piece(): torch 2.13 and later count begins and ends.
    void end_graph() {
        end_tried = true;
        const c10::cuda::CUDAStreamGuard back(stream);
        if (auto* const ring = std::exchange(options.ring, nullptr); ring != nullptr) {
            captured->ring = ring->capture_end(stream.stream());
        }
        graph()->end(stream.stream());
    }

    void end_piece() {
        end_graph();
        captured->memset_kernels += session().end_piece(graph()->graph(), options.memset_kernels);
    }

    void next_piece() {
        if (options.ring != nullptr) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE,
                   "cannot begin another piece: a step of a ring is captured in one piece; capture "
                   "without CaptureOptions::ring");
        }
        end_piece();
        captured->pieces.push_back(std::make_unique<compat::Graph>());
        begun = end_tried = false;
        // The body may have changed the current stream.
        const c10::cuda::CUDAStreamGuard back(stream);
        begin_piece();
    }

    void end() {
        end_piece();
        session().leave();
        std::vector<cudaGraph_t> graphs;
        for (const auto& piece : captured->pieces) {
            graphs.push_back(piece->graph());
        }
        const auto& executables = session().executables(graphs, pinned || captured->ring);
        session().keep_workspaces();
        session().seal(options.retain, Written::no).executable_bytes = executables.bytes();
    }

    void abandon() noexcept {
        session().abandon(pool, &graph(), options.generators, [&] {
            if (auto* const ring = std::exchange(options.ring, nullptr); ring != nullptr) {
                ring->capture_abandon();
            }
            if (end_tried || !(begun || is_capturing(stream.stream()))) {
                return false;
            }
            // Works while the capture is intact. Only the regular end resets torch's generators.
            end_graph();
            return true;
        });
    }
};

CaptureScope::CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options) {
    if (handle_of(stream) == nullptr) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "CUDA graphs must be captured on a non-default stream.");
    }
    if (options.route == Route::mempool && options.retain == Retain::own_pages) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot capture with Retain::own_pages: the MemPool route shares its segments; use "
               "the blocks route or another Retain");
    }
    const auto is_cudas = [](const auto& one) {
        return one && one->defined() && one->device().is_cuda();
    };
    if (!std::all_of(options.generators.begin(), options.generators.end(), is_cudas)) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot capture with the generator: it is undefined or on a CPU; pass defined "
               "generators on CUDA devices");
    }
    const auto device = device_of(arena);
    for (const auto& generator : options.generators) {
        if (generator->device() != device) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot capture with the generator: it is on " +
                                                        generator->device().str() +
                                                        " and the arena on " + device.str() +
                                                        "; pass a generator of " + device.str());
        }
    }
    CaptureSession::require_ready(options.route);
    {
        const OnDevice current(device);
        require_not_capturing(stream);
        require_stream_of(device, stream);
    }
    const auto current = c10::cuda::getCurrentCUDAStream(device.index());
    const auto torch_stream =
        current.stream() == stream
            ? current
            : c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device.index());
    auto captured = std::unique_ptr<CapturedGraph::State>(new CapturedGraph::State(
        arena, options.route, ExecutablePool::State::of(arena, options.executables)));
    if (!options.label.empty()) {
        captured->session.space().set_label(options.label);
    }
    state_.reset(new State{options, torch_stream, std::move(captured)});
    // This thread may capture on a second device. Torch's allocations would break the other
    // capture, and a generator that fails to register terminates the process.
    const Relaxed relaxed;
    // The capture's own memory must not be paused with a region.
    const DisableScope torchs_own;
    bury();
    try {
        state_->session().begin(torch_stream);
        state_->begin_piece();
    } catch (...) {
        state_->abandon();
        throw;
    }
}

CaptureScope::~CaptureScope() {
    if (state_ && state_->captured && state_->session().is_capturing()) {
        const Relaxed relaxed;
        const DisableScope torchs_own;
        state_->abandon();
    }
}

void CaptureScope::next_piece() {
    auto& own = State::running(state_);
    const Relaxed relaxed;
    const DisableScope torchs_own;
    own.next_piece();
}

bool CaptureScope::holds(const void* storage) const {
    if (!state_ || !state_->captured || storage == nullptr) {
        return false;
    }
    const auto& session = state_->captured->session;
    if (state_->options.route == Route::blocks) {
        return registry::owner_of(storage) == session.memory();
    }
    try {
        // Torch's blocks lie in segments, which are blocks of the space.
        std::size_t bytes = 0;
        auto* const segment = caching::getBaseAllocation(const_cast<void*>(storage), &bytes);
        const auto segments = session.space().live_blocks();
        return std::find(segments.begin(), segments.end(), segment) != segments.end();
    } catch (const c10::Error&) {
        // Not memory of torch.
        return false;
    }
}

void* CaptureScope::last_kernel() {
    auto& own = State::running(state_);
    const auto last =
        last_of(c10::cuda::getCurrentCUDAStream(own.session().device().index()).stream());
    if (!last || last->size() != 1 || !is(last->front(), cudaGraphNodeTypeKernel)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot return the last kernel: the last node of torch's current stream is missing "
               "or no kernel; call last_kernel() right "
               "after a launch");
    }
    own.pinned = true;
    return last->front();
}

CapturedGraph CaptureScope::end() {
    auto& own = State::running(state_);
    const Relaxed relaxed;
    const DisableScope torchs_own;
    // If this throws, the destructor abandons the capture.
    own.end();
    if (own.options.route == Route::mempool && own.session().report().peak_live_bytes == 0 &&
        holds_memory(own.pool)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot share the capture's memory: torch allocated it elsewhere, as with "
               "expandable_segments; turn this setting off or use "
               "the blocks route");
    }
    return CapturedGraph(std::move(own.captured));
}

}  // namespace vmmgraph::torch
