#include "graph_group.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include "block_allocator.hpp"
#include "collectives.hpp"
#include "failed.hpp"
#include "guards.hpp"
#include "mark_behind.hpp"
#include "memsets.hpp"
#include "registry.hpp"
#include "short_of_memory.hpp"
#include "torchs_pool.hpp"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

using Others = compat::GraphOfOthers<at::cuda::CUDAGraph>;

// Copy of live blocks' contents while a seal replaces their pages: on the device if there is room,
// else in host memory.
class Contents {
public:
    Contents(const rust::Vec<bridge::PreservedBlock>& blocks, cudaStream_t stream) : stream_(stream) {
        std::size_t total = 0;
        for (const auto& block : blocks) {
            parts_.push_back({reinterpret_cast<char*>(block.address), total, block.bytes});
            total += block.bytes;
        }
        if (total > 0 && cudaMalloc(&device_, total) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            device_ = nullptr;
            host_.resize(total);
        }
        copy(false);
    }
    Contents(const Contents&) = delete;
    Contents& operator=(const Contents&) = delete;
    ~Contents() {
        if (device_ != nullptr) {
            static_cast<void>(cudaFree(device_));
        }
    }

    void put_back() { copy(true); }

private:
    struct Part {
        char* block;
        std::size_t offset;
        std::size_t bytes;
    };

    void copy(bool back) {
        if (parts_.empty()) {
            return;
        }
        char* const kept = device_ != nullptr ? static_cast<char*>(device_) : host_.data();
        for (const auto& part : parts_) {
            C10_CUDA_CHECK(cudaMemcpyAsync(back ? part.block : kept + part.offset, back ? kept + part.offset : part.block, part.bytes,
                                           cudaMemcpyDefault, stream_));
        }
        C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    }

    cudaStream_t stream_;
    std::vector<Part> parts_;
    void* device_ = nullptr;
    std::vector<char> host_;
};

// Waiting for a capturing stream would break the capture.
void wait_for(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
        static_cast<void>(cudaGetLastError());
        return;
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
}

}  // namespace

GraphGroup::UnderWay::UnderWay(c10::DeviceIndex device, const c10::cuda::CUDAStream& stream, Workspace& workspace)
    : stream(stream), counted(device, stream.stream()), workspaces(workspace, stream) {}

GraphGroup::GraphGroup(SharedVmmAllocator& arena)
    : device_(device_of(arena).index()),
      space_(arena.open_space()),
      memory_(std::make_shared<Memory>(space_)),
      workspace_(Workspace::of(arena, memory_)),
      pool_(ExecutablePool::of(arena)) {
    memory_->launch_by_replay_only(true);
    memory_->predict_retained();
}

GraphGroup::~GraphGroup() {
    const OnDevice current({c10::kCUDA, device_});
    const Relaxed relaxed;
    try {
        // Live tensors belong to the program, so the seal must give each its own pages.
        if (!sealed_ && space_.stats().blocks > 0) {
            static_cast<void>(seal_keeping_contents(policy(Retain::inherit)));
        }
    } catch (...) {
        // Out of memory: live tensors stay on shared pages, and later replays of the arena
        // overwrite them.
    }
    if (waits_.load()) {
        // The stream may be destroyed, so torch cannot be told about it.
        static_cast<void>(vmmgraph_space_wait(space_.handle()));
    }
    workspace_->leave(*memory_, last_stream_, kept_workspaces_);
    registry::forget_capture(memory_.get());
    if (template_) {
        template_->close();
    }
}

c10::cuda::CUDAStream GraphGroup::stream() const { return c10::cuda::getCurrentCUDAStream(device_); }

void GraphGroup::begin(const compat::PoolId& pool) {
    require_release();
    offer_idle_pages();
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "vmmgraph_torch_install() comes before a capture");
    }
    const auto stream = this->stream();
    if (stream.stream() == nullptr) {
        // Torch's wording, because programs search for this text.
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "CUDA graphs must be captured on a non-default stream.");
    }
    const std::lock_guard lock(mutex_);
    if (sealed_ || under_way_) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               sealed_ ? "the graph group is sealed: open another one for another capture" : "a capture into this group is under way");
    }
    if (registry::is_captured_into({device_, pool})) {
        // Torch's allocator checks this too, but only after torch has reset the running capture's
        // random-number state.
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "a capture into this pool is under way already");
    }
    if (registry::uses_of({device_, pool}) == 0 && torchs_uses_of(device_, pool) > 0) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "the pool is torch's own: a MemPool, or one that graphs were captured into before");
    }
    const OnDevice current({c10::kCUDA, device_});
    if (is_capturing(stream.stream())) {
        refuse(VMMGRAPH_ERROR_STREAM_CAPTURING, "the stream is under capture already");
    }
    // As in CaptureScope.
    std::optional<Relaxed> relaxed(std::in_place);
    std::optional<DisableScope> torchs_own(std::in_place);
    under_way_ = std::make_unique<UnderWay>(device_, stream, *workspace_);
    // Restarted in `under_way_`; end in begun().
    relaxed.reset();
    torchs_own.reset();
    under_way_->relaxed.emplace();
    under_way_->torchs_own.emplace();
    announce(memory_);
}

void GraphGroup::begun() {
    const bool ignored = withdraw();
    const std::lock_guard lock(mutex_);
    if (!under_way_) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "no capture into this group is under way");
    }
    under_way_->torchs_own.reset();
    under_way_->relaxed.reset();
    if (ignored) {
        under_way_.reset();
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "torch began the capture without asking the allocator that stands over its own: another one was "
               "installed over it, or the graph is none of torch's");
    }
}

ForeignPiece GraphGroup::end(const ForeignGraph& graph) {
    const Relaxed relaxed;
    const DisableScope torchs_own;
    const OnDevice current({c10::kCUDA, device_});
    std::unique_lock lock(mutex_);
    if (!under_way_) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "no capture into this group is under way");
    }
    registry::forget_capture(memory_.get());
    memory_->capture_ended();
    const auto under_way = std::move(under_way_);
    if (lasts(under_way->stream)) {
        captured_on_.insert(under_way->stream.stream());
        memory_->captured_on(under_way->stream.stream());
    } else {
        // The stream may be destroyed before a tensor is freed.
        memory_->launch_by_replay_only(false);
    }
    auto kept = under_way->workspaces.end(*memory_);
    std::move(kept.begin(), kept.end(), std::back_inserter(kept_workspaces_));

    ForeignPiece piece{pieces_.size(), 0, graph.graph != nullptr && Others::is(*graph.graph, graph.pool, graph.raw), false};
    if (graph.raw != nullptr) {
        collectives_ = collectives_ || has_registered_collectives(graph.raw, memory_->is_shareable());
        if (graph.memset_kernels) {
            piece.memset_kernels = replace_memsets(graph.raw, under_way->stream);
        }
    }
    piece.lent = piece.replayable && graph.lend && graph.raw != nullptr;
    by_hand_ = by_hand_ || !piece.replayable;
    if (by_hand_) {
        use_workspace(lock, nullptr);
    }
    pieces_.push_back({piece.replayable ? graph.graph : nullptr, piece.lent ? graph.raw : nullptr});
    return piece;
}

void GraphGroup::abandon(const compat::PoolId& pool) noexcept {
    static_cast<void>(withdraw());
    const Relaxed relaxed;
    const OnDevice current({c10::kCUDA, device_});
    const std::lock_guard lock(mutex_);
    if (!under_way_) {
        return;
    }
    const auto under_way = std::move(under_way_);
    try {
        memory_->capture_ended();
        const DisableScope torchs_own;
        end_by_hand(under_way->stream.stream());
        const bool unended = abandon_one(device_, pool, memory_.get());
        if (unended) {
            compat::abandon_host_pool(pool);
        }
        registry::forget_capture(memory_.get());
        static_cast<void>(under_way->workspaces.end(*memory_));
        reset_generators(under_way->stream, {});
    } catch (...) {
        // No more can be done; the next capture opens a new space.
    }
}

Retain GraphGroup::policy(Retain asked) const {
    const auto retain = asked == Retain::inherit ? static_cast<Retain>(space_.stats().retain) : asked;
    return collectives_ ? with_collectives(retain, memory_->has_remote()) : retain;
}

SealReport GraphGroup::seal_keeping_contents(Retain retain) {
    const auto stream = this->stream();
    if (is_capturing(stream.stream())) {
        return space_.seal(retain);
    }
    // Blocks must not be freed between here and put_back(): the copy would land on pages a graph
    // uses.
    const auto preserved = memory_->preserve(retain);
    const auto blocks = bridge::preserved_blocks(*preserved);
    if (blocks.empty()) {
        return space_.seal(retain);
    }
    // Programs may write to the tensors on these streams.
    wait_for(cudaStreamLegacy);
    std::for_each(captured_on_.begin(), captured_on_.end(), wait_for);
    Contents contents(blocks, stream.stream());
    const auto report = space_.seal(retain);
    contents.put_back();
    return report;
}

SealReport GraphGroup::seal(Retain retain, Written written) {
    const Relaxed relaxed;
    const OnDevice current({c10::kCUDA, device_});
    const std::lock_guard lock(mutex_);
    if (under_way_) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "a capture into this group is under way");
    }
    if (!sealed_) {
        retain = policy(retain);
        sealed_ = written == Written::no ? space_.seal(retain) : seal_keeping_contents(retain);
        sealed_->executable_bytes = Template::expected_bytes(*pool_, lending());
    }
    return *sealed_;
}

const GraphGroup::Piece& GraphGroup::replayable(std::size_t piece) const {
    if (piece >= pieces_.size() || pieces_[piece].graph == nullptr) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "piece " + std::to_string(piece) + " of " + std::to_string(pieces_.size()) +
                                               " is not replayed here: its owner does that, or it is gone");
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

Template& GraphGroup::executables() {
    if (!template_) {
        template_ = std::make_unique<Template>(pool_, lending(), collectives_);
    }
    return *template_;
}

bool GraphGroup::instantiate() {
    const Relaxed relaxed;
    const OnDevice current({c10::kCUDA, device_});
    const std::lock_guard lock(mutex_);
    if (!sealed_) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "cannot instantiate the graphs of a group before it is sealed");
    }
    return lending().empty() || executables().instantiate();
}

void GraphGroup::use_workspace(std::unique_lock<std::mutex>& lock, const c10::cuda::CUDAStream* stream) {
    constexpr int tries = 8;
    for (int tried = 1;; ++tried) {
        const auto status = stream != nullptr ? workspace_->use_on(*memory_, *stream) : workspace_->use_anywhere(*memory_);
        if (!BlockOwner::is_out_of_memory(status) || tried == tries) {
            return detail::check(status);
        }
        // The callbacks of make_room() may destroy graphs.
        lock.unlock();
        const bool again = make_room(device_, workspace_->bytes());
        lock.lock();
        tried = again ? tried : tries - 1;
    }
}

void GraphGroup::launch(std::size_t number, const c10::cuda::CUDAStream& stream) {
    std::unique_lock lock(mutex_);
    use_workspace(lock, &stream);
    const auto& piece = replayable(number);
    if (!last_stream_.note(stream)) {
        waits_.store(true);
    }
    if (piece.lends == nullptr) {
        return Others::launch(*piece.graph, nullptr, stream.stream());
    }
    const Template::Launch launch(executables());
    Others::launch(*piece.graph, launch.at(piece.place), stream.stream());
}

void GraphGroup::replay(std::size_t piece) {
    const OnDevice current({c10::kCUDA, device_});
    const auto stream = this->stream();
    const MarkBehind marks(space_, stream);
    space_.replay(stream.stream(), [&] { launch(piece, stream); });
}

Difference GraphGroup::verify(std::size_t piece, const std::vector<Output>& outputs) {
    const OnDevice current({c10::kCUDA, device_});
    const auto stream = this->stream();
    const MarkBehind marks(space_, stream);
    return space_.verify(stream.stream(), outputs, [&] { launch(piece, stream); });
}

void GraphGroup::launched_by_hand() {
    memory_->launch_by_replay_only(false);
    const Relaxed relaxed;
    const OnDevice current({c10::kCUDA, device_});
    std::unique_lock lock(mutex_);
    by_hand_ = true;
    // A running capture uses the workspace; its end repeats this call.
    if (!under_way_) {
        use_workspace(lock, nullptr);
    }
}

void GraphGroup::drop(std::size_t number, bool keep) {
    const Relaxed relaxed;
    const std::lock_guard lock(mutex_);
    if (number >= pieces_.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "there is no piece " + std::to_string(number) + ", the group has " + std::to_string(pieces_.size()));
    }
    auto& piece = pieces_[number];
    // The remaining pieces form a new template.
    if (piece.lends != nullptr && template_) {
        template_->close();
        template_.reset();
    }
    piece.lends = nullptr;
    if (!keep) {
        piece.graph = nullptr;
    }
}

}  // namespace vmmgraph::torch
