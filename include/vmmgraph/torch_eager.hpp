// VmmGraph for libtorch: eager work in the memory of an arena's graphs. Link VmmGraph::torch.
//
//   vmmgraph::torch::install();
//   ...                                                             // capture decode graphs in `arena`
//   {
//       const vmmgraph::torch::EagerScope scope(arena, stream);
//       logits = model.prefill(prompt);                            // its activations lie on the graphs' pages
//   }
//   decode.replay(stream);                                          // `logits` is intact
//
// This header includes no torch header.

#ifndef VMMGRAPH_TORCH_EAGER_HPP
#define VMMGRAPH_TORCH_EAGER_HPP

#include <cstdint>
#include <memory>
#include <optional>

#include "arena.hpp"

namespace vmmgraph::torch {

// While it lives, `stream` is torch's current one, and the CUDA storages that its thread makes on that stream lie on the shared pages of the
// arena. It is one replay of the arena: in order behind those before it, and no other is launched before it ends. So activations take
// as much as the graphs or as the eager work needs, whichever is more, and not both.
//
// Contents are real. A tensor that is alive when the scope ends keeps its address, its pages and its bytes until it is freed, by any
// thread at any time, whatever is replayed; graphs that used those pages get others at their next replay. What is small and lasts is
// better made in a KeptScope: no page is exchanged for it.
//
// Within a scope memory goes from tensor to tensor in the order of the stream, as torch's own does. A tensor that another stream uses
// has to know it (record_stream) or to be alive until that stream is done; work on other streams is joined with the scope's before its end.
//
// Refused in a scope, by the thread that has it: replays, captures and scopes of the same arena, and pausing it; other threads' replays wait.
// Other arenas go on as ever. Storages are not the arena's if they are made on another stream, by another thread, on a stream under capture,
// in a DisableScope, or in a RegionScope inside this scope; of the two the innermost counts. cuBLAS workspaces that torch makes here leave
// torch's tables at the end.
//
// Out of memory is torch's own error, after torch's cache was emptied. To be destroyed on its thread, in the reverse order; to end it may fall to
// another one.
class VMMGRAPH_API EagerScope {
public:
    // `stream`: a cudaStream_t of the arena's device; null is the default stream. Throws Error: VMMGRAPH_ERROR_WRONG_STATE before install() or
    // for what that refuses, inside a replay or a scope of this arena, and while it is paused; VMMGRAPH_ERROR_STREAM_CAPTURING;
    // VMMGRAPH_ERROR_INVALID_ARGUMENT for an arena of the host driver; out of memory or budget. Nothing has changed then.
    //
    // Where pages of the arena are on lease (lease.hpp), it asks for every page that the arena's scopes ever used. With `bytes`, the most that
    // its tensors, and workspaces that cuBLAS makes in it, come to at once and a little for the ends of pages, it goes without those on lease
    // that so much does not need: they stay on lease, and no tensor lies on them. If it comes to need more, that tensor is refused, or waits
    // for a recall whose engine is asked within the scope.
    EagerScope(SharedVmmAllocator& arena, void* stream, std::optional<std::uint64_t> bytes = std::nullopt);
    EagerScope(const EagerScope&) = delete;
    EagerScope& operator=(const EagerScope&) = delete;
    // No driver call but the question after captures; what is alive is kept, without a copy.
    ~EagerScope();

    // Ends it before its destructor, which then only makes torch's current stream what it was. On any thread, for a program in which whoever comes to
    // the end is not always the scope's own: what that one makes afterwards is torch's. Nothing if it has ended. The work of the scope
    // has been given to its stream. Throws Error: VMMGRAPH_ERROR_WRONG_STATE for the default stream of another thread (cudaStreamPerThread),
    // which only that one can name; the scope goes on.
    void end();

    // Whether storages that this thread makes on the scope's stream are an arena's now.
    [[nodiscard]] static bool active() noexcept;

private:
    friend class EagerEnding;
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_EAGER_HPP
