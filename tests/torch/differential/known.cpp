#include "known.hpp"

namespace differential {

std::vector<Known> known_differences() {
    constexpr auto statistics =
        "Torch's statistics, snapshots and trackers do not have the tensors of a capture (blocks route), or "
        "have the workspace that captures share as well (MemPool route).";
    constexpr auto shared = "What the MemPool route leaves on shared pages is overwritten by the next replay of another graph.";
    constexpr auto refused = "What a capture refuses by itself is a vmmgraph::Error with its status, and no c10::Error.";
    constexpr auto sound =
        "Torch's own failed captures can leave torch in a state of capture; after ours it is as after a capture that succeeded.";
    return {
        // Whatever happened, to be as after a plain graph is right.
        {"*", "*", "after: ", "a_plain_graph", sound},
        {"*", "*", "left", "a_plain_graph", sound},
        {"statistics", "blocks", "statistics:", "", statistics},
        {"statistics", "mempool", "statistics:", "", statistics},
        {"snapshots", "blocks", "snapshot:", "", statistics},
        {"snapshots", "mempool", "snapshot:", "", statistics},
        {"a_recorded_history", "blocks", "history:", "", statistics},
        {"a_trace_tracker", "blocks", "tracker:", "", statistics},
        {"a_trace_tracker", "mempool", "tracker:", "", statistics},
        {"a_memory_fraction", "blocks", "fraction:", "",
         "Torch's memory fraction does not bound the blocks route, whose bound is the arena's or the device's budget."},
        {"a_body_that_leaves_another_stream_behind", "*", "stream:", "",
         "A capture ends on its own stream, whichever the body leaves behind; torch's own refuses to."},
        {"a_capture_on_the_default_stream", "*", "default:", "", refused},
        {"a_capture_of_a_stream_that_is_captured", "*", "twice:", "", refused},
        {"a_replay_onto_a_stream_that_is_captured", "*", "launch:", "",
         "A replay onto a stream under capture is refused and the capture goes on; CUDA, asked by torch, breaks it."},
        {"a_second_generator_that_is_named", "*", "named:", "",
         "A graph draws from torch's default generator; others cannot be named to a capture."},
        {"one_graph_reads_what_another_one_made", "mempool", "out", "", shared},
        {"forward_and_backward_in_two_graphs", "mempool", "backward:", "", shared},
        {"outputs_are_read_on_side_streams_and_dropped", "mempool", "read:", "", shared},
        {"tensors_outlive_their_graph", "mempool", "kept:", "", shared},
        {"twenty_failures_and_their_tensors", "mempool", "kept", "", shared},
    };
}

}  // namespace differential
