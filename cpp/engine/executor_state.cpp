#include "executor_state.hpp"

#include <algorithm>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

namespace vmmgraph::engine {
namespace {

// The same memory, owned by nobody: the space keeps the address as long as its graph.
at::Tensor alias(const at::Tensor& tensor) {
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .strides(tensor.strides())
        .options(tensor.options())
        .target_device(tensor.device())
        .make_tensor();
}

}  // namespace

void Recorder::eager(at::TensorList tensors, Runner runner) {
    if (step_ != nullptr || mode_ == Mode::full) {
        static const Step recorded;
        runner(mode_ == Mode::full ? recorded : *step_, tensors);
        return;
    }
    auto& piece = pieces_.emplace_back(Piece{std::move(runner), {}});
    for (const auto& tensor : tensors) {
        piece.tensors.push_back(alias(tensor));
    }
    scope_->next_piece();
}

std::size_t GraphExecutor::State::there() const {
    return static_cast<std::size_t>(std::count_if(graphs.begin(), graphs.end(), [](const Graph& graph) { return graph.there; }));
}

void GraphExecutor::State::forget(Slot slot) {
    auto& graph = graphs[slot];
    graph.there = false;
    // The pieces last: a runner may own memory that the graph uses.
    graph.captured.reset();
    graph.pieces.clear();
    dispatcher.evicted(slot);
}

bool GraphExecutor::State::evict(Slot kept) {
    const auto oldest = dispatcher.least_recently_used(kept);
    if (oldest == dispatch::no_slot) {
        return false;
    }
    forget(oldest);
    if (arena) {
        arena->trim();
    }
    return true;
}

void GraphExecutor::State::make_room(Slot slot) {
    while (full() && evict(slot)) {
    }
    // A capture that finds no room costs as much as one that does, so the first try had better succeed.
    const auto short_of_bytes = [&] { return arena->stats().charged_bytes + graphs[slot].own_bytes > options.most_bytes; };
    if (!arena || options.most_bytes == 0 || !short_of_bytes()) {
        return;
    }
    arena->trim();
    while (short_of_bytes() && evict(slot)) {
    }
}

void GraphExecutor::State::warm_up_products() const {
    const auto stream = c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(options.capture_stream), inputs.device().index());
    const c10::cuda::CUDAStreamGuard guard(stream);
    const auto some = at::zeros({16, 16}, at::TensorOptions().dtype(at::kFloat).device(inputs.device()));
    static_cast<void>(at::mm(some, some));
    // With a bias it is cuBLASLt, which may have a workspace of its own.
    static_cast<void>(at::addmm(some.select(0, 0), some, some));
}

void GraphExecutor::State::record(Graph& graph, const Step& current) {
    Recorder recorder(graph.mode, graph.bucket);
    if (on_cpu()) {
        recorder.step_ = &current;
        body(recorder);
        return;
    }
    const c10::cuda::CUDAGuard device(inputs.device());
    warm_up_products();
    const auto kept_before = arena->stats().kept_bytes;
    torch::CaptureScope scope(*arena, options.capture_stream, options.capture);
    recorder.scope_ = &scope;
    body(recorder);
    graph.captured.emplace(scope.end());
    graph.pieces = std::move(recorder.pieces_);
    const auto kept = arena->stats().kept_bytes;
    graph.own_bytes = graph.captured->report().retained_bytes + (kept > kept_before ? kept - kept_before : 0);
}

bool GraphExecutor::State::capture(Slot slot, const Step& current, bool may_evict) {
    auto& graph = graphs[slot];
    if (may_evict) {
        make_room(slot);
    }
    std::string why;
    bool no_room = false;
    do {
        try {
            inputs.select(graph.bucket);
            record(graph, current);
            graph.there = true;
            dispatcher.captured(slot);
            return true;
        } catch (const OutOfMemory& error) {
            why = error.what();
            no_room = true;
        } catch (const c10::OutOfMemoryError& error) {
            why = error.what_without_backtrace();
            no_room = true;
        } catch (const std::exception& error) {
            why = error.what();
            no_room = false;
        }
        graph.captured.reset();
        graph.pieces.clear();
    } while (no_room && may_evict && evict(slot));
    if (no_room && !may_evict) {
        dispatcher.abandoned(slot);
        return false;
    }
    graph.failed = true;
    dispatcher.failed(slot);
    last_failure = "graph of " + text_of(graph.bucket) + ": " + why;
    if (no_room && arena) {
        last_failure += "; the arena holds " + std::to_string(arena->stats().charged_bytes) + " bytes";
        last_failure += options.most_bytes > 0 ? ", and the limit is " + std::to_string(options.most_bytes) : "";
    }
    TORCH_WARN("vmmgraph: no ", last_failure, "; its steps do without");
    return false;
}

void GraphExecutor::State::replay(Graph& graph, const Step& current, void* stream) {
    if (on_cpu()) {
        inputs.select(graph.bucket);
        record(graph, current);
    } else if (graph.pieces.empty()) {
        graph.captured->replay(stream);
    } else {
        graph.captured->replay(stream, [&](std::size_t n) { graph.pieces[n].runner(current, graph.pieces[n].tensors); });
    }
}

void GraphExecutor::State::give_up() {
    if (step && decision.capture) {
        dispatcher.abandoned(decision.slot);
    }
    step.reset();
}

}  // namespace vmmgraph::engine
