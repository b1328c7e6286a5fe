// Replays on streams that may be gone at the next one.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <vmmgraph/vmmgraph.hpp>

#include "on_device.hpp"

namespace vmmgraph::torch {

// Puts a mark behind a replay on a stream that may not last, when it goes: the next one waits for that and does not name the stream.
// Nothing for torch's own streams.
class MarkBehind {
public:
    MarkBehind(const Space& space, const c10::cuda::CUDAStream& stream) noexcept : space_(lasts(stream) ? nullptr : space.handle()) {}
    MarkBehind(const MarkBehind&) = delete;
    MarkBehind& operator=(const MarkBehind&) = delete;
    ~MarkBehind() {
        if (space_ != nullptr) {
            // Where it cannot be recorded the next replay says so.
            static_cast<void>(vmmgraph_space_mark(space_));
        }
    }

private:
    vmmgraph_space_t space_;
};

}  // namespace vmmgraph::torch
