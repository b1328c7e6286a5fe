#include "graph_group.hpp"

#include <string>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "block_allocator.hpp"
#include "guards.hpp"
#include "mark_behind.hpp"
#include "registry.hpp"
#include "short_of_memory.hpp"
#include "torchs_pool.hpp"

namespace vmmgraph::torch {
namespace {

using Others = compat::GraphOfOthers<at::cuda::CUDAGraph>;

}  // namespace

GraphGroup::~GraphGroup() {
    const OnDevice current(session_.device());
    const Relaxed relaxed;
    // Tensors belong to the program. If out of memory, live tensors stay on shared pages, and later
    // replays of the arena overwrite them.
    attempt([&] {
        if (!session_.is_sealed() && space().stats().blocks > 0) {
            session_.seal(Retain::inherit, Written::perhaps);
        }
    });
    if (waits_.load()) {
        // The stream may be destroyed, so torch cannot be told about it.
        static_cast<void>(vmmgraph_space_wait(space().handle()));
    }
    session_.leave_workspaces();
    session_.close_executables();
}

void GraphGroup::begin(const compat::PoolId& pool, bool free_workspace) {
    CaptureSession::require_ready(Route::blocks);
    const auto stream = this->stream();
    if (stream.stream() == nullptr) {
        // Torch's wording, because programs search for this text.
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "CUDA graphs must be captured on a non-default stream.");
    }
    const std::lock_guard lock(mutex_);
    if (session_.is_sealed() || session_.is_capturing()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               session_.is_sealed()
                   ? "cannot capture into the graph group: it is sealed; open another graph group"
                   : "cannot capture into the graph group: another capture into it is running; end "
                     "that capture first");
    }
    const auto device = session_.device();
    const registry::PoolKey key{device.index(), pool};
    if (registry::is_captured_into(key)) {
        // Torch's allocator checks this too, but only after torch has reset the running capture's
        // random-number state.
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot capture into the pool: a capture into this pool is running; end that "
               "capture first");
    }
    if (const int uses = registry::uses_of(key) > 0 ? 0 : torchs_uses_of(device.index(), pool);
        uses > 0) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture into the pool: it is torch's own, as a MemPool or with earlier "
               "graphs, and has " +
                   std::to_string(uses) + " uses; pass a new id of graph_pool_handle()");
    }
    const OnDevice current(device);
    require_not_capturing(stream.stream());
    {
        const Relaxed relaxed;
        const DisableScope torchs_own;
        session_.begin(stream, free_workspace);
    }
    beginning_.emplace();
    announce(session_.memory());
}

void GraphGroup::require_capture() const {
    if (!session_.is_capturing()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot continue the capture: none into this graph group is running; call "
               "vmmgraph_torch_capture_begin first");
    }
}

void GraphGroup::begun() {
    const bool ignored = withdraw();
    const std::lock_guard lock(mutex_);
    require_capture();
    beginning_.reset();
    if (ignored) {
        session_.cancel();
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture into the graph group: torch began the capture without this "
               "library's allocator; install this allocator "
               "last, and capture graphs of torch");
    }
}

void GraphGroup::end(const vmmgraph_torch_graph_t& graph, vmmgraph_torch_captured_t& captured) {
    const Relaxed relaxed;
    const DisableScope torchs_own;
    const OnDevice current(session_.device());
    std::unique_lock lock(mutex_);
    require_capture();
    auto failed = c10::make_scope_exit([this] { session_.cancel(); });
    auto* const torchs = static_cast<at::cuda::CUDAGraph*>(graph.graph);
    auto* const raw = static_cast<cudaGraph_t>(graph.raw);
    const auto memset_kernels = session_.end_piece(raw, graph.memset_kernels != 0);
    const bool replayable =
        torchs != nullptr &&
        Others::is(*torchs, compat::PoolId(graph.pool_first, graph.pool_second), raw);
    const bool lent = replayable && graph.lend != 0 && raw != nullptr;
    const auto guards = session_.leave();
    failed.release();
    by_hand_ = by_hand_ || !replayable;
    if (by_hand_) {
        use_workspace(lock, nullptr);
    }
    captured = {captured.struct_size, pieces_.size(), memset_kernels, replayable, lent};
    pieces_.push_back({replayable ? torchs : nullptr, lent ? raw : nullptr});
}

void GraphGroup::abandon(const compat::PoolId& pool) noexcept {
    static_cast<void>(withdraw());
    const std::lock_guard lock(mutex_);
    beginning_.reset();
    const Relaxed relaxed;
    const OnDevice current(session_.device());
    const DisableScope torchs_own;
    session_.abandon(pool);
}

const SealReport& GraphGroup::seal(Retain retain, Written written) {
    const Relaxed relaxed;
    const OnDevice current(session_.device());
    const std::lock_guard lock(mutex_);
    if (session_.is_capturing()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot seal the graph group: a capture into it is running; end that capture first");
    }
    if (!session_.is_sealed()) {
        session_.seal(retain, written).executable_bytes =
            Template::expected_bytes(session_.executable_pool(), lending());
    }
    return session_.report();
}

const GraphGroup::Piece& GraphGroup::replayable(std::size_t piece) const {
    if (piece >= pieces_.size() || pieces_[piece].graph == nullptr) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot replay piece " + std::to_string(piece) + " of " +
                   std::to_string(pieces_.size()) +
                   ": it is unknown, dropped, or launched by its owner; launch it between "
                   "vmmgraph_space_enter and vmmgraph_space_leave");
    }
    return pieces_[piece];
}

std::vector<cudaGraph_t> GraphGroup::lending() {
    std::vector<cudaGraph_t> graphs;
    for (auto& piece : pieces_) {
        if (piece.lends != nullptr) {
            piece.place = graphs.size();
            graphs.push_back(piece.lends);
        }
    }
    return graphs;
}

bool GraphGroup::instantiate() {
    const Relaxed relaxed;
    const OnDevice current(session_.device());
    const std::lock_guard lock(mutex_);
    if (!session_.is_sealed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot instantiate the graph group: it is not sealed; call "
               "vmmgraph_torch_group_seal first");
    }
    const auto graphs = lending();
    return graphs.empty() || session_.executables(graphs, false).instantiate();
}

void GraphGroup::use_workspace(std::unique_lock<std::mutex>& lock,
                               const c10::cuda::CUDAStream* stream) {
    auto& workspace = session_.workspace();
    const auto& memory = *session_.memory();
    constexpr int tries = 8;
    for (int tried = 1;; ++tried) {
        const auto status =
            stream != nullptr ? workspace.use_on(memory, *stream) : workspace.use_anywhere(memory);
        if (!BlockOwner::is_out_of_memory(status) || tried == tries) {
            return detail::check(status);
        }
        // The callbacks of make_room() may destroy graphs.
        lock.unlock();
        const bool again = make_room(session_.device().index(), workspace.bytes());
        lock.lock();
        tried = again ? tried : tries - 1;
    }
}

void GraphGroup::launch(std::size_t number, const c10::cuda::CUDAStream& stream) {
    std::unique_lock lock(mutex_);
    use_workspace(lock, &stream);
    const auto& piece = replayable(number);
    if (!session_.launched_on(stream)) {
        waits_.store(true);
    }
    if (piece.lends == nullptr) {
        return Others::launch(*piece.graph, nullptr, stream.stream());
    }
    const Template::Launch launch(session_.executables() ? *session_.executables()
                                                         : session_.executables(lending(), false));
    Others::launch(*piece.graph, launch.at(piece.place), stream.stream());
}

void GraphGroup::replay(std::size_t piece) {
    const OnDevice current(session_.device());
    const auto stream = this->stream();
    const MarkBehind marks(space(), stream);
    session_.space().replay(stream.stream(), [&] { launch(piece, stream); });
}

Difference GraphGroup::verify(std::size_t piece, const std::vector<Output>& outputs) {
    const OnDevice current(session_.device());
    const auto stream = this->stream();
    const MarkBehind marks(space(), stream);
    return session_.space().verify(stream.stream(), outputs, [&] { launch(piece, stream); });
}

void GraphGroup::launched_by_hand() {
    session_.memory()->launch_by_replay_only(false);
    const Relaxed relaxed;
    const OnDevice current(session_.device());
    std::unique_lock lock(mutex_);
    by_hand_ = true;
    // A running capture uses the workspace; its end repeats this call.
    if (!session_.is_capturing()) {
        use_workspace(lock, nullptr);
    }
}

void GraphGroup::drop(std::size_t number, bool keep) {
    const Relaxed relaxed;
    const std::lock_guard lock(mutex_);
    if (number >= pieces_.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot drop piece " + std::to_string(number) + ": the graph group has " +
                   std::to_string(pieces_.size()) + " pieces; pass a number of a capture");
    }
    auto& piece = pieces_[number];
    // The remaining pieces form a new template.
    if (piece.lends != nullptr) {
        session_.close_executables();
    }
    piece.lends = nullptr;
    if (!keep) {
        piece.graph = nullptr;
    }
}

}  // namespace vmmgraph::torch
