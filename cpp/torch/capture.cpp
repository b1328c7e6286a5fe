#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_region.hpp>

#include "block_allocator.hpp"
#include "collectives.hpp"
#include "compat.hpp"
#include "executables.hpp"
#include "failed.hpp"
#include "guards.hpp"
#include "mark_behind.hpp"
#include "memsets.hpp"
#include "nodes.hpp"
#include "on_device.hpp"
#include "registry.hpp"
#include "segments.hpp"
#include "short_of_memory.hpp"
#include "workspace.hpp"

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

bool draws_on_gpu(const std::shared_ptr<const at::Generator>& generator) {
    return generator && generator->defined() && generator->device().is_cuda();
}

}  // namespace

const char* built_for() noexcept { return TORCH_VERSION; }

struct CapturedGraph::State {
    c10::DeviceIndex device;
    Space space;
    std::shared_ptr<Memory> memory;
    SegmentPool segments;
    std::shared_ptr<Workspace> workspace;
    std::vector<KeptWorkspace> kept_workspaces;
    std::unique_ptr<compat::Graph> graph;
    std::vector<std::unique_ptr<compat::Graph>> earlier;
    SealReport report;
    std::size_t memset_kernels = 0;
    // Executables of the graphs; null until the captures have ended.
    std::shared_ptr<Template> graphs = nullptr;
    std::optional<RingGraph> ring = std::nullopt;
    LastStream last_stream{};

    OnStream on(void* stream) const { return OnStream({c10::kCUDA, device}, stream); }

    // Launches all pieces in order on torch's current stream; `between` runs after each but the
    // last.
    void launch(const OnStream& current, const std::function<void(std::size_t)>& between) {
        auto* const stream = current.stream().stream();
        last_stream.note(current.stream());
        const Template::Launch executables(*graphs);
        for (std::size_t piece = 0; piece < earlier.size(); ++piece) {
            earlier[piece]->lend(executables.at(piece));
        }
        graph->lend(executables.at(earlier.size()));
        for (std::size_t piece = 0; piece < earlier.size(); ++piece) {
            earlier[piece]->launch(stream);
            if (between) {
                between(piece);
                current.again();
            }
        }
        if (ring) {
            ring->launch(executables.at(earlier.size()), stream, [&] { graph->launch(stream); });
        } else {
            graph->launch(stream);
        }
    }

    ~State() {
        const OnDevice current(c10::Device(c10::kCUDA, device));
        const Relaxed relaxed;
        // Programs often drop a graph's inputs with the graph, so wait for its replays, unless the
        // last stream is under capture.
        if (graph) {
            try {
                space.wait();
            } catch (const std::exception&) {
                workspace->leave(*memory, last_stream, kept_workspaces);
            }
        }
        if (graphs) {
            graphs->close();
        }
        ring.reset();
        // Order: the graphs release their pool, the pool returns its segments, and the space unmaps
        // its pages after its replays. Live tensors share ownership of `memory` and keep their
        // pages.
        graph.reset();
        earlier.clear();
        bury(std::move(segments));
    }
};

CapturedGraph::CapturedGraph(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
CapturedGraph::CapturedGraph(CapturedGraph&&) noexcept = default;
CapturedGraph& CapturedGraph::operator=(CapturedGraph&&) noexcept = default;
CapturedGraph::~CapturedGraph() = default;

CapturedGraph::State& CapturedGraph::state() const {
    if (!state_) {
        refuse(VMMGRAPH_ERROR_INVALID_HANDLE, "the graph was moved from");
    }
    return *state_;
}

void CapturedGraph::replay(void* stream) { replay(stream, {}); }

void CapturedGraph::replay(void* stream, const std::function<void(std::size_t)>& between) {
    State& own = state();
    const auto current = own.on(stream);
    const MarkBehind marks(own.space, current.stream());
    own.space.replay(stream, [&] { own.launch(current, between); });
}

Difference CapturedGraph::verify(void* stream, const std::vector<Output>& outputs) {
    State& own = state();
    const auto current = own.on(stream);
    const MarkBehind marks(own.space, current.stream());
    return own.space.verify(stream, outputs, [&] { own.launch(current, {}); });
}

std::size_t CapturedGraph::pieces() const noexcept { return state_ ? state_->earlier.size() + 1 : 0; }
std::size_t CapturedGraph::memset_kernels() const noexcept { return state_ ? state_->memset_kernels : 0; }
const SealReport& CapturedGraph::report() const { return state().report; }
const Space& CapturedGraph::space() const { return state().space; }

void* CapturedGraph::exec() const { return exec(state().earlier.size()); }

void* CapturedGraph::exec(std::size_t piece) const {
    auto& own = state();
    if (piece > own.earlier.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "piece " + std::to_string(piece) + " of a graph of " + std::to_string(own.earlier.size() + 1));
    }
    own.graphs->pin();
    const Template::Launch executables(*own.graphs);
    return executables.at(piece);
}

bool CapturedGraph::instantiate() { return state().graphs->instantiate(); }

void CapturedGraph::instantiate_soon() {
    if (const auto& graphs = state().graphs; !graphs->touch()) {
        graphs->pool()->state_->instantiator.ask(graphs);
    }
}

bool CapturedGraph::is_instantiated() const { return state().graphs->is_instantiated(); }
std::uint64_t CapturedGraph::executable_bytes() const { return state().graphs->bytes(); }
std::shared_ptr<ExecutablePool> CapturedGraph::executables() const { return state().graphs->pool(); }

struct CaptureScope::State {
    Route route;
    bool memset_kernels;
    Retain retain;
    std::shared_ptr<ExecutablePool> executables;
    Generators generators;
    // Null unless a ring is being captured: outside its capture the ring may serve a different one.
    Ring* ring;
    RingCaptureOptions ring_capture;
    c10::cuda::CUDAStream stream;
    compat::PoolId pool_id;
    std::unique_ptr<CapturedGraph::State> captured;
    std::optional<c10::cuda::CUDAStreamGuard> guard;
    std::optional<compat::PoolContext> context;
    std::optional<CaptureUnderWay> under_way;
    std::optional<WorkspaceTable> workspaces;
    int uses_before = 0;
    bool begun = false;
    bool end_tried = false;
    // True if NCCL may have registered pages of this capture.
    bool collectives = false;
    // True if the caller sets kernel parameters in the executables. A new instantiation would lose
    // the parameters.
    bool pinned = false;

    void leave() noexcept {
        registry::forget_capture(captured->memory.get());
        under_way.reset();
        context.reset();
        guard.reset();
    }

    void begin() {
        guard.emplace(stream);
        workspaces.emplace(*captured->workspace, stream);
        if (route == Route::mempool) {
            captured->segments.allocator = make_segment_allocator(captured->memory);
            captured->segments.pool = compat::make_pool(captured->segments.allocator);
            pool_id = captured->segments.pool->id();
            context.emplace(captured->segments.pool.get());
        }
        under_way.emplace(captured->device, stream.stream());
        begin_piece();
    }

    void begin_piece() {
        // Each piece has its own pool id, since torch releases the id with the piece.
        if (route == Route::mempool) {
            uses_before = captured->segments.pool->use_count();
        } else {
            pool_id = at::cuda::graph_pool_handle();
        }
        std::optional<Announcement> announcement;
        if (route == Route::blocks) {
            announcement.emplace(captured->memory);
        }
        for (const auto& generator : generators) {
            captured->graph->draw_from(*generator);
        }
        captured->graph->capture_begin(pool_id, cudaStreamCaptureModeThreadLocal);
        begun = true;
        if (auto* const begins = std::exchange(ring, nullptr); begins != nullptr) {
            begins->capture_begin(stream.stream(), ring_capture);
            ring = begins;
        }
    }

    void next_piece() {
        if (ring != nullptr) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE, "a step of a ring is captured in one piece");
        }
        end();
        finish();
        captured->earlier.push_back(std::exchange(captured->graph, std::make_unique<compat::Graph>()));
        begun = end_tried = false;
        // The body may have changed the current stream.
        const c10::cuda::CUDAStreamGuard back(stream);
        begin_piece();
    }

    // At most once, and only after begin_piece(): torch 2.13 and later count begins and ends.
    void end() {
        end_tried = true;
        const c10::cuda::CUDAStreamGuard back(stream);
        if (auto* const ends = std::exchange(ring, nullptr); ends != nullptr) {
            captured->ring = ends->capture_end(stream.stream());
        }
        captured->graph->end(stream.stream());
        captured->memory->capture_ended();
    }

    void finish() {
        auto* const graph = captured->graph->graph();
        collectives = collectives || has_registered_collectives(graph, captured->memory->is_shareable());
        if (memset_kernels) {
            captured->memset_kernels += replace_memsets(graph, stream);
        }
    }

    // Makes the template of all pieces; no piece may follow.
    void make_template() {
        std::vector<cudaGraph_t> graphs;
        for (const auto& piece : captured->earlier) {
            graphs.push_back(piece->graph());
        }
        graphs.push_back(captured->graph->graph());
        captured->graphs = std::make_shared<Template>(std::move(executables), graphs, collectives || pinned || captured->ring);
    }

    SealReport seal() {
        auto& space = captured->space;
        const auto asked = retain == Retain::inherit ? static_cast<Retain>(space.stats().retain) : retain;
        const auto policy = collectives ? with_collectives(asked, captured->memory->has_remote()) : asked;
        try {
            return space.seal(policy);
        } catch (const Error& error) {
            if (policy == asked || error.status() != VMMGRAPH_ERROR_WRONG_STATE) {
                throw;
            }
            refuse(
                VMMGRAPH_ERROR_WRONG_STATE,
                "the capture has collectives whose buffers NCCL may have registered, and a tensor that is still alive lies on a page that "
                "other graphs use and would have to move: allocate what stays in a KeptScope, or the buffers in a RemoteScope with "
                "Retain::shared_remote, or set NCCL_GRAPH_REGISTER=0");
        }
    }

    // Returns true if torch still counted the use.
    bool give_pool_back() {
        if (route == Route::blocks) {
            return abandon(captured->device, pool_id);
        }
        if (!captured->segments.pool || captured->segments.pool->use_count() <= uses_before) {
            return false;
        }
        try {
            caching::endAllocateToPool(captured->device, pool_id);
        } catch (...) {
            // The pool had ended already.
        }
        caching::releasePool(captured->device, pool_id);
        return true;
    }

    void abandon_capture() noexcept {
        auto& graph = captured->graph;
        bool ended = false;
        if (auto* const begun_ring = std::exchange(ring, nullptr); begun_ring != nullptr) {
            begun_ring->capture_abandon();
        }
        if (!end_tried && (begun || is_capturing(stream.stream()))) {
            try {
                // Works while the capture is intact. Only the regular end resets torch's
                // generators.
                end();
                ended = true;
            } catch (...) {
            }
        }
        if (!ended) {
            end_by_hand(stream.stream());
        }
        try {
            captured->memory->capture_ended();
        } catch (...) {
            // Out of host memory: the seal frees the blocks.
        }
        try {
            graph->reset();
        } catch (...) {
            // The code below does the rest.
        }
        try {
            // Before the graph is destroyed: torch's filters refer to the graph.
            if (give_pool_back()) {
                compat::abandon_host_pool(pool_id);
            }
            graph.reset();
            if (workspaces) {
                static_cast<void>(workspaces->end(*captured->memory));
            }
            // Live tensors belong to the program, so the seal gives each its own pages.
            if (route == Route::blocks && captured->space.stats().blocks > 0) {
                static_cast<void>(captured->space.seal(Retain::own_pages));
            }
        } catch (...) {
            // A destructor cannot do more. The next capture opens a new space.
        }
        if (!ended) {
            reset_generators(stream, generators);
        }
    }
};

CaptureScope::CaptureScope(SharedVmmAllocator& arena, void* stream, const CaptureOptions& options) {
    if (handle_of(stream) == nullptr) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "CUDA graphs must be captured on a non-default stream.");
    }
    if (options.route == Route::mempool && options.retain == Retain::own_pages) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "the MemPool route shares its segments: it cannot give live blocks pages of their own");
    }
    if (std::any_of(options.generators.begin(), options.generators.end(), [](const auto& one) { return !draws_on_gpu(one); })) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "a graph draws from generators of CUDA's only");
    }
    const auto device = device_of(arena);
    for (const auto& generator : options.generators) {
        if (generator->device() != device) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "a generator is of " + generator->device().str() + ", the arena of " + device.str());
        }
    }
    require_release();
    offer_idle_pages();
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    if (options.route == Route::mempool) {
        require_native_allocator();
        require_pools_with_allocators();
    } else if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "call vmmgraph::torch::install() before a capture by the blocks route");
    }
    {
        const OnDevice current(device);
        // Otherwise a failure below would end the stream's own capture.
        if (is_capturing(static_cast<cudaStream_t>(stream))) {
            refuse(VMMGRAPH_ERROR_STREAM_CAPTURING, "the stream is under capture already");
        }
        require_stream_of(device, stream);
    }
    const auto current = c10::cuda::getCurrentCUDAStream(device.index());
    const auto torch_stream =
        current.stream() == stream ? current : c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device.index());
    auto executables = ExecutablePool::State::of(arena, options.executables);
    auto space = options.route == Route::mempool ? arena.open_bump_space() : arena.open_space();
    if (!options.label.empty()) {
        space.set_label(options.label);
    }
    auto memory = std::make_shared<Memory>(space);
    auto captured = std::unique_ptr<CapturedGraph::State>(new CapturedGraph::State{
        device.index(), std::move(space), memory, {}, Workspace::of(arena), {}, std::make_unique<compat::Graph>(), {}, {}});
    state_.reset(new State{options.route,
                           options.memset_kernels,
                           options.retain,
                           std::move(executables),
                           options.generators,
                           options.ring,
                           options.ring_capture,
                           torch_stream,
                           {0, 0},
                           std::move(captured),
                           std::nullopt,
                           std::nullopt,
                           std::nullopt,
                           std::nullopt});
    // This thread may capture on a second device. Torch's allocations would break the other
    // capture, and a generator that fails to register terminates the process.
    const Relaxed relaxed;
    // The capture's own memory must not be paused with a region.
    const DisableScope torchs_own;
    bury();
    try {
        state_->begin();
    } catch (...) {
        if (state_->under_way) {
            state_->abandon_capture();
        }
        state_->leave();
        throw;
    }
}

CaptureScope::~CaptureScope() {
    if (state_ && state_->under_way) {
        const Relaxed relaxed;
        const DisableScope torchs_own;
        state_->abandon_capture();
        state_->leave();
    }
}

void CaptureScope::next_piece() {
    if (!state_ || !state_->under_way || state_->end_tried) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "the capture has ended already");
    }
    const Relaxed relaxed;
    const DisableScope torchs_own;
    state_->next_piece();
}

bool CaptureScope::holds(const void* storage) const {
    if (!state_ || !state_->captured || storage == nullptr) {
        return false;
    }
    const auto& captured = *state_->captured;
    if (state_->route == Route::blocks) {
        return registry::owner_of(storage) == captured.memory;
    }
    try {
        // Torch's blocks lie in segments, which are blocks of the space.
        std::size_t bytes = 0;
        auto* const segment = caching::getBaseAllocation(const_cast<void*>(storage), &bytes);
        const auto segments = captured.space.live_blocks();
        return std::find(segments.begin(), segments.end(), segment) != segments.end();
    } catch (const c10::Error&) {
        // Not memory of torch.
        return false;
    }
}

void* CaptureScope::last_kernel() {
    if (!state_ || !state_->under_way || state_->end_tried) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "the capture has ended already");
    }
    const auto last = last_of(c10::cuda::getCurrentCUDAStream(state_->captured->device).stream());
    if (!last || last->size() != 1 || !is(last->front(), cudaGraphNodeTypeKernel)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "torch's current stream was not given a kernel last in this capture");
    }
    state_->pinned = true;
    return last->front();
}

CapturedGraph CaptureScope::end() {
    if (!state_ || !state_->under_way || state_->end_tried) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "the capture has ended already");
    }
    const Relaxed relaxed;
    const DisableScope torchs_own;
    // If this throws, the destructor abandons the capture.
    state_->end();
    state_->finish();
    state_->leave();
    state_->make_template();
    auto& captured = *state_->captured;
    captured.kept_workspaces = state_->workspaces->end(*captured.memory);
    captured.report = state_->seal();
    captured.report.executable_bytes = captured.graphs->bytes();
    if (state_->route == Route::mempool && captured.report.peak_live_bytes == 0 && holds_memory(state_->pool_id)) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "torch took the capture's memory from elsewhere (expandable_segments?): nothing is shared");
    }
    return CapturedGraph(std::move(state_->captured));
}

}  // namespace vmmgraph::torch
