#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <vmmgraph/engine.hpp>

namespace vmmgraph::engine {
namespace {

thread_local Recorder* recording = nullptr;

// The same memory, owned by nobody: the space keeps the address as long as its graph.
at::Tensor alias(const at::Tensor& tensor) {
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .strides(tensor.strides())
        .options(tensor.options())
        .target_device(tensor.device())
        .make_tensor();
}

}  // namespace

Recorder* Recorder::current() noexcept { return recording; }

void Recorder::call(const std::function<void(Recorder&)>& body) {
    struct Back {
        Recorder* before;
        ~Back() { recording = before; }
    };
    const Back back{std::exchange(recording, this)};
    body(*this);
}

void* Recorder::last_kernel() { return scope_ == nullptr ? nullptr : scope_->last_kernel(); }

void Recorder::eager(at::TensorList tensors, Runner runner) {
    if (step_ != nullptr || mode_ == Mode::full) {
        static const Step recorded;
        runner(mode_ == Mode::full ? recorded : *step_, tensors);
        return;
    }
    auto& piece = pieces_.emplace_back(Piece{std::move(runner), {}});
    for (const auto& tensor : tensors) {
        const bool ours = tensor.defined() && tensor.has_storage() && scope_->holds(tensor.storage().data());
        piece.tensors.push_back(ours ? alias(tensor) : tensor);
    }
    scope_->next_piece();
}

}  // namespace vmmgraph::engine
