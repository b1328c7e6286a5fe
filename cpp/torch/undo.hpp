// Refusals, and the undo of a failed capture. Without CUDA: cpp/torch_npu uses this header, too.
#pragma once

#include <string>

#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

[[noreturn]] inline void refuse(vmmgraph_status_t status, const std::string& why) {
    auto info = detail::sized<ErrorInfo>();
    info.status = status;
    info.device = -1;
    throw Error("vmmgraph: " + why, info);
}

// Runs a step of an undo. Its failure must not prevent the next steps.
template <class Step>
void attempt(Step&& step) noexcept {
    try {
        step();
    } catch (...) {
        // No more can be done. The next capture opens a new space.
    }
}

// Seals the space of an abandoned capture if it has live tensors. These belong to the program, so
// the seal gives each its own pages. Returns whether there were any.
inline bool seal_live_tensors(Space& space) {
    const bool live = space.stats().blocks > 0;
    if (live) {
        static_cast<void>(space.seal(Retain::own_pages));
    }
    return live;
}

}  // namespace vmmgraph::torch
