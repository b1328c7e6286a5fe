// Replays on streams that may be destroyed before the next replay.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <vmmgraph/vmmgraph.hpp>

#include "on_device.hpp"

namespace vmmgraph::torch {

// Records a mark after a replay on destruction, so the next replay does not use the stream. Does
// nothing for torch's own streams, which are never destroyed.
class MarkBehind {
public:
    MarkBehind(const Space& space, const c10::cuda::CUDAStream& stream) noexcept
        : space_(lasts(stream) ? nullptr : space.handle()) {}
    MarkBehind(const MarkBehind&) = delete;
    MarkBehind& operator=(const MarkBehind&) = delete;
    ~MarkBehind() {
        if (space_ != nullptr) {
            static_cast<void>(vmmgraph_space_mark(space_));
        }
    }

private:
    vmmgraph_space_t space_;
};

}  // namespace vmmgraph::torch
