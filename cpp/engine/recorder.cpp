#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAStream.h>

#include "executor_state.hpp"

namespace vmmgraph::engine {
namespace {

thread_local Recorder* of_this_thread = nullptr;

// Returns a non-owning alias: the space keeps the address as long as its graph.
at::Tensor alias(const at::Tensor& tensor) {
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .strides(tensor.strides())
        .options(tensor.options())
        .target_device(tensor.device())
        .make_tensor();
}

}  // namespace

Recorder* Recorder::current() noexcept { return of_this_thread; }

void Recorder::call(const std::function<void(Recorder&)>& body) {
    struct Back {
        Recorder* before;
        ~Back() { of_this_thread = before; }
    };
    const Back back{std::exchange(of_this_thread, this)};
    body(*this);
}

UnitScope take_unit(Ring* ring, std::size_t unit, c10::Device device) {
    if (ring == nullptr) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot stream unit " + std::to_string(unit) +
                   ": the executor has no ring; set ExecutorOptions::ring");
    }
    void* const stream =
        device.is_cuda() ? c10::cuda::getCurrentCUDAStream(device.index()).stream() : nullptr;
    return UnitScope(*ring, unit, stream);
}

UnitScope Recorder::streamed(std::size_t unit) {
    if (ring_ != nullptr && mode_ == Mode::piecewise && scope_ != nullptr) {
        refuse(
            VMMGRAPH_ERROR_WRONG_STATE,
            "cannot stream unit " + std::to_string(unit) +
                ": a piece of a graph streams nothing; call GraphExecutor::streamed() in a runner");
    }
    return take_unit(ring_, unit, device_);
}

void* Recorder::last_kernel() { return scope_ == nullptr ? nullptr : scope_->last_kernel(); }

void Recorder::eager(at::TensorList tensors, Runner runner) {
    if (scope_ == nullptr || mode_ == Mode::full) {
        static const Step recorded;
        runner(mode_ == Mode::full ? recorded : *step_, tensors);
        return;
    }
    auto& piece = pieces_.emplace_back(Piece{std::move(runner), {}});
    for (const auto& tensor : tensors) {
        const bool ours =
            tensor.defined() && tensor.has_storage() && scope_->holds(tensor.storage().data());
        piece.tensors.push_back(ours ? alias(tensor) : tensor);
    }
    scope_->next_piece();
}

}  // namespace vmmgraph::engine
