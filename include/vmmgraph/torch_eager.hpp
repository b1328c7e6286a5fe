// VmmGraph for libtorch: eager work in the memory of an arena's graphs. Link VmmGraph::torch.
//
//   vmmgraph::torch::install();
//   ...                                            // capture decode graphs in `arena`
//   {
//       const vmmgraph::torch::EagerScope scope(arena, stream);
//       logits = model.prefill(prompt);            // its activations lie on the graphs' pages
//   }
//   decode.replay(stream);                         // `logits` is intact
//
// This header includes no torch header.

#ifndef VMMGRAPH_TORCH_EAGER_HPP
#define VMMGRAPH_TORCH_EAGER_HPP

#include <cstdint>
#include <memory>
#include <optional>

#include "arena.hpp"

namespace vmmgraph::torch {

// An eager scope: CUDA storages made by its thread on `stream` lie on the shared pages of the
// arena. `stream` is torch's current stream meanwhile. The scope counts as one replay of the arena:
// ordered after earlier replays, with no other replay before its end. So the arena needs the larger
// of the graphs' and the eager work's memory, not the sum.
//
// A tensor alive at the end keeps its address, pages and bytes until freed, on any thread at any
// time; graphs over these pages get others at their next replay. Make small, lasting tensors in a
// KeptScope, which costs no page.
//
// Memory is reused in stream order, as in torch's allocator. A tensor used by another stream needs
// record_stream(), or must outlive the use. Join other streams with the scope's stream before the
// end.
//
// The scope's thread may not replay, capture, pause or open another scope in this arena; replays of
// other threads wait. Other arenas are unaffected. Storages are not the arena's if made on another
// stream or thread, on a stream under capture, in a DisableScope, or in a RegionScope inside this
// scope; the innermost of the two counts. cuBLAS workspaces made in the scope leave torch's tables
// at the end.
//
// Out of memory is torch's own error, after emptying torch's cache. Destroy the scope on its
// thread, in reverse order; another thread may call end().
class VMMGRAPH_API EagerScope {
public:
    // `stream` is a cudaStream_t of the arena's device; null is the default stream. Throws Error,
    // with nothing changed: VMMGRAPH_ERROR_WRONG_STATE if install() was not called or would refuse,
    // inside a replay or scope of this arena, or if the arena is paused;
    // VMMGRAPH_ERROR_STREAM_CAPTURING; VMMGRAPH_ERROR_INVALID_ARGUMENT for the host driver; out of
    // memory or budget.
    //
    // With pages on lease (lease.hpp), the scope demands every page ever used by the arena's
    // scopes. `bytes`, the peak of its tensors and new cuBLAS workspaces plus a little for page
    // ends, reduces the demand: leased pages beyond stay on lease. A tensor beyond `bytes` is
    // refused, or waits for a recall whose engine is asked within the scope.
    EagerScope(SharedVmmAllocator& arena, void* stream,
               std::optional<std::uint64_t> bytes = std::nullopt);
    EagerScope(const EagerScope&) = delete;
    EagerScope& operator=(const EagerScope&) = delete;
    // Makes no driver call except the capture query; keeps live tensors without a copy.
    ~EagerScope();

    // Ends the scope early; the destructor then only restores torch's current stream. Callable on
    // any thread; later tensors of the scope's thread are torch's own. No effect if already ended.
    // The scope's work must already be on its stream. Throws Error (VMMGRAPH_ERROR_WRONG_STATE) for
    // another thread's default stream (cudaStreamPerThread), which only its thread can name; the
    // scope then continues.
    void end();

    // Returns true if storages made by this thread on the scope's stream go to an arena now.
    [[nodiscard]] static bool active() noexcept;

private:
    friend class EagerEnding;
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_EAGER_HPP
