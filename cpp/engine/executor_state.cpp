#include "executor_state.hpp"

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

void GraphExecutor::State::forget(std::uint32_t slot) {
    auto& graph = graphs[slot];
    graph.there = false;
    // The pieces last: a runner may own memory that the graph uses.
    graph.captured.reset();
    graph.pieces.clear();
    report(slot, VMMGRAPH_GRAPH_EVICTED);
    --stats.graphs;
}

bool GraphExecutor::State::evict(std::uint32_t kept) {
    std::uint32_t oldest = UINT32_MAX;
    for (std::uint32_t slot = 0; slot < graphs.size(); ++slot) {
        if (slot != kept && graphs[slot].there && (oldest == UINT32_MAX || graphs[slot].used < graphs[oldest].used)) {
            oldest = slot;
        }
    }
    if (oldest == UINT32_MAX) {
        return false;
    }
    forget(oldest);
    ++stats.evictions;
    if (arena) {
        arena->trim();
    }
    return true;
}

bool GraphExecutor::State::over_bytes() {
    if (!arena || options.most_bytes == 0 || bytes() <= options.most_bytes) {
        return false;
    }
    arena->trim();
    return bytes() > options.most_bytes;
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
    torch::CaptureScope scope(*arena, options.capture_stream, options.capture);
    recorder.scope_ = &scope;
    body(recorder);
    graph.captured.emplace(scope.end());
    graph.pieces = std::move(recorder.pieces_);
}

bool GraphExecutor::State::capture(std::uint32_t slot, const Step& current, bool may_evict) {
    auto& graph = graphs[slot];
    std::string why;
    while (options.most_graphs > 0 && stats.graphs >= options.most_graphs && may_evict && evict(slot)) {
    }
    for (bool again = true; again && !graph.there;) {
        again = false;
        try {
            inputs.select(graph.bucket);
            record(graph, current);
            graph.there = true;
        } catch (const OutOfMemory& error) {
            why = error.what();
            again = may_evict && evict(slot);
        } catch (const c10::OutOfMemoryError& error) {
            why = error.what_without_backtrace();
            again = may_evict && evict(slot);
        } catch (const std::exception& error) {
            why = error.what();
        }
    }
    if (graph.there) {
        ++stats.graphs;
        ++stats.captures;
        graph.used = ++clock;
        report(slot, VMMGRAPH_GRAPH_CAPTURED);
        while (over_bytes() && may_evict && evict(slot)) {
        }
        if (!over_bytes()) {
            return true;
        }
        why = "its arena would hold " + std::to_string(bytes()) + " bytes, and the limit is " + std::to_string(options.most_bytes);
        forget(slot);
        arena->trim();
        if (!may_evict) {
            return false;
        }
        report(slot, VMMGRAPH_GRAPH_BEGIN);
    }
    graph.captured.reset();
    graph.pieces.clear();
    graph.failed = true;
    ++stats.failures;
    report(slot, VMMGRAPH_GRAPH_FAILED);
    last_failure = "graph of " + text_of(graph.bucket) + ": " + why;
    TORCH_WARN("vmmgraph: no ", last_failure, "; its steps run eagerly");
    return false;
}

void GraphExecutor::State::replay(Graph& graph, const Step& current, void* stream) {
    graph.used = ++clock;
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
    if (step && decision.capture != 0) {
        report(decision.slot, VMMGRAPH_GRAPH_FAILED);
        report(decision.slot, VMMGRAPH_GRAPH_FORGIVEN);
    }
    step.reset();
}

}  // namespace vmmgraph::engine
