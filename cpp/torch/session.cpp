#include "session.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include "block_allocator.hpp"
#include "collectives.hpp"
#include "guards.hpp"
#include "memsets.hpp"
#include "short_of_memory.hpp"

namespace vmmgraph::torch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Waiting for a capturing stream would break the capture.
void wait_for(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
        status != cudaStreamCaptureStatusNone) {
        static_cast<void>(cudaGetLastError());
        return;
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
}

}  // namespace

CaptureSession::CaptureSession(SharedVmmAllocator& arena, std::optional<Route> route,
                               std::shared_ptr<ExecutablePool> executables)
    : device_(device_of(arena)),
      of_program_(!route),
      route_(route.value_or(Route::blocks)),
      space_(route_ == Route::mempool ? arena.open_bump_space() : arena.open_space()),
      memory_(std::make_shared<Memory>(space_)),
      workspace_(Workspace::of(arena, of_program_ ? memory_ : nullptr)),
      executables_(executables ? std::move(executables) : ExecutablePool::of(arena)) {
    if (of_program_) {
        memory_->launch_by_replay_only(true);
        memory_->predict_retained();
    }
}

void CaptureSession::require_ready(Route route) {
    require_release();
    offer_idle_pages();
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    if (route == Route::mempool) {
        require_native_allocator();
        require_pools_with_allocators();
    } else if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot begin a capture: the allocator is not installed; call "
               "vmmgraph::torch::install() first");
    }
}

void CaptureSession::begin(const c10::cuda::CUDAStream& stream, bool free_workspace) {
    auto running = std::make_unique<Running>(stream);
    if (of_program_) {
        running->counted.emplace(device_.index(), stream.stream());
        workspaces_.emplace(*workspace_, stream, free_workspace);
    } else {
        running->guard.emplace(stream);
        workspaces_.emplace(*workspace_, stream);
        if (route_ == Route::mempool) {
            segments_.allocator = make_segment_allocator(memory_);
            segments_.pool = compat::make_pool(segments_.allocator);
            running->context.emplace(segments_.pool.get());
        }
        running->counted.emplace(device_.index(), stream.stream());
    }
    running_ = std::move(running);
}

compat::PoolId CaptureSession::begin_piece() {
    // Each piece has its own pool id, since torch releases the id with the piece.
    if (!segments_.pool) {
        return at::cuda::graph_pool_handle();
    }
    uses_before_ = segments_.pool->use_count();
    return segments_.pool->id();
}

std::size_t CaptureSession::end_piece(cudaGraph_t graph, bool memset_kernels) {
    if (of_program_) {
        registry::forget_capture(memory_.get());
    }
    memory_->capture_ended();
    if (of_program_) {
        const auto& stream = running_->stream;
        if (lasts(stream)) {
            captured_on_.insert(stream.stream());
            memory_->captured_on(stream.stream());
        } else {
            // The stream may be destroyed before a tensor is freed.
            memory_->launch_by_replay_only(false);
        }
        keep_workspaces();
    }
    if (graph == nullptr) {
        return 0;
    }
    collectives_ = collectives_ || has_registered_collectives(graph, memory_->is_shareable());
    return memset_kernels ? replace_memsets(graph, running_->stream) : 0;
}

void CaptureSession::keep_workspaces() {
    auto kept = workspaces_->end(*memory_);
    std::move(kept.begin(), kept.end(), std::back_inserter(kept_workspaces_));
}

void CaptureSession::cancel() noexcept {
    workspaces_.reset();
    running_.reset();
}

bool CaptureSession::give_pool_back(const compat::PoolId& pool) {
    if (of_program_) {
        return abandon_one(device_.index(), pool, memory_.get());
    }
    if (route_ == Route::blocks) {
        return torch::abandon(device_.index(), pool);
    }
    if (!segments_.pool || segments_.pool->use_count() <= uses_before_) {
        return false;
    }
    // Throws if the pool had ended already.
    attempt([&] { caching::endAllocateToPool(device_.index(), pool); });
    caching::releasePool(device_.index(), pool);
    return true;
}

void CaptureSession::abandon(const compat::PoolId& pool, std::unique_ptr<compat::Graph>* graph,
                             const Generators& generators,
                             const std::function<bool()>& end) noexcept {
    if (!running_) {
        return;
    }
    const auto stream = running_->stream;
    bool ended = false;
    attempt([&] { ended = end(); });
    if (!ended) {
        end_by_hand(stream.stream());
    }
    // Out of host memory: the seal frees the blocks.
    attempt([&] { memory_->capture_ended(); });
    if (graph != nullptr) {
        attempt([&] { (*graph)->reset(); });
    }
    attempt([&] {
        if (give_pool_back(pool)) {
            compat::abandon_host_pool(pool);
        }
        if (graph != nullptr) {
            // After its pool: torch's filters refer to the graph.
            graph->reset();
        }
        registry::forget_capture(memory_.get());
        static_cast<void>(workspaces_->end(*memory_));
        if (!of_program_ && route_ == Route::blocks) {
            seal_live_tensors(space_);
        }
    });
    if (!ended) {
        reset_generators(stream, generators);
    }
    cancel();
}

SealReport& CaptureSession::seal(Retain retain, Written written) {
    if (report_) {
        return *report_;
    }
    const auto asked =
        retain == Retain::inherit ? static_cast<Retain>(space_.stats().retain) : retain;
    const auto policy = collectives_ ? with_collectives(asked, memory_->has_remote()) : asked;
    try {
        report_ = written == Written::no ? space_.seal(policy) : seal_with_contents(policy);
    } catch (const Error& error) {
        if (policy == asked || error.status() != VMMGRAPH_ERROR_WRONG_STATE) {
            throw;
        }
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot seal the capture: NCCL may have registered buffers of its collectives, and "
               "a live tensor would have to leave a page "
               "of other graphs; allocate live tensors in a KeptScope, or the buffers in a "
               "RemoteScope with Retain::shared_remote, or set "
               "NCCL_GRAPH_REGISTER=0");
    }
    return *report_;
}

SealReport CaptureSession::seal_with_contents(Retain retain) {
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    if (torch::is_capturing(stream)) {
        return space_.seal(retain);
    }
    // Blocks must not be freed between here and the last copy, which would land on pages a graph
    // uses.
    const auto preserved = memory_->preserve(retain);
    const auto blocks = bridge::preserved_blocks(*preserved);
    std::size_t total = 0;
    for (const auto& block : blocks) {
        total += block.bytes;
    }
    if (total == 0) {
        return space_.seal(retain);
    }
    // Programs may write to the tensors on these streams.
    wait_for(cudaStreamLegacy);
    std::for_each(captured_on_.begin(), captured_on_.end(), wait_for);
    // Copies on the device if there is room, else in host memory.
    void* device = nullptr;
    std::vector<char> host;
    if (cudaMalloc(&device, total) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        device = nullptr;
        host.resize(total);
    }
    const std::unique_ptr<void, cudaError_t (*)(void*)> owner(device, &cudaFree);
    const auto copy = [&](bool back) {
        char* kept = device != nullptr ? static_cast<char*>(device) : host.data();
        for (const auto& block : blocks) {
            auto* const own = reinterpret_cast<char*>(block.address);
            C10_CUDA_CHECK(cudaMemcpyAsync(back ? own : kept, back ? kept : own, block.bytes,
                                           cudaMemcpyDefault, stream));
            kept += block.bytes;
        }
        C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    };
    copy(false);
    const auto report = space_.seal(retain);
    copy(true);
    return report;
}

Template& CaptureSession::executables(const std::vector<cudaGraph_t>& graphs, bool pinned) {
    if (!template_) {
        template_ = std::make_shared<Template>(executables_, graphs, collectives_ || pinned);
    }
    return *template_;
}

void CaptureSession::close_executables() noexcept {
    if (template_) {
        template_->close();
    }
    template_.reset();
}

}  // namespace vmmgraph::torch
