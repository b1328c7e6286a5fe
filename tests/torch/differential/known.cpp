#include "known.hpp"

namespace differential {

std::vector<Known> known_differences() {
    constexpr auto statistics =
        "Torch's statistics, snapshots and trackers do not have the tensors of a capture (blocks "
        "route), or "
        "have the workspace that captures share as well (MemPool route).";
    constexpr auto shared =
        "What the MemPool route leaves on shared pages is overwritten by the next replay of "
        "another graph.";
    constexpr auto goes =
        "A graph may be destroyed while its thread captures; torch's own breaks the capture.";
    constexpr auto waits =
        "A graph's pool that could not go, since the program allocated to one of its own, goes "
        "with the next graph.";
    constexpr auto observed =
        "Out of memory in a capture by the blocks route calls no observer of torch's and is not "
        "counted by it.";
    constexpr auto refused =
        "What a capture refuses by itself is a vmmgraph::Error with its status, and no c10::Error.";
    constexpr auto sound =
        "Torch's own failed captures can leave torch in a state of capture; after ours it is as "
        "after a capture that succeeded.";
    return {
        // The state after a plain graph is always right.
        {"*", "*", "after: ", "a_plain_graph", sound},
        {"*", "*", "left", "a_plain_graph", sound},
        {"statistics", "blocks", "statistics:", "", statistics},
        {"statistics", "mempool", "statistics:", "", statistics},
        {"snapshots", "blocks", "snapshot:", "", statistics},
        {"a_recorded_history", "blocks", "history:", "", statistics},
        {"a_trace_tracker", "blocks", "tracker:", "", statistics},
        {"a_trace_tracker", "mempool", "tracker:", "", statistics},
        {"a_memory_fraction", "blocks", "fraction:", "",
         "Torch's memory fraction does not bound the blocks route, whose bound is the arena's or "
         "the device's budget."},
        {"a_body_that_leaves_another_stream_behind", "*", "stream:", "",
         "A capture ends on its own stream, whichever the body leaves behind; torch's own refuses "
         "to."},
        {"a_capture_on_the_default_stream", "*", "default:", "", refused},
        {"a_capture_of_a_stream_that_is_captured", "*", "", "", refused},
        {"a_graph_that_goes_in_the_body", "*", "the capture", "", goes},
        {"a_graph_that_goes_in_the_body", "*", "out", "", goes},
        {"an_assertion_on_the_device", "*", "", "",
         "After an error of the device every call fails; torch's own capture ends the process."},
        {"asked_while_it_captures", "*", "the current stream is the one given", "",
         "In a capture torch's current stream is the one given by another of torch's names, that "
         "of a stream it did not make."},
        {"an_observer_of_out_of_memory", "blocks", "observer: ", "", observed},
        {"an_observer_of_out_of_memory", "blocks", "statistics: ", "", observed},
        {"a_graph_is_dropped_while_a_pool_of_the_programs_is_used", "mempool",
         "left: bytes of torch's reserved", "", waits},
        {"a_graph_is_dropped_while_a_pool_of_the_programs_is_used", "mempool",
         "left: bytes of the arena", "", waits},
        {"deleters_and_pointers", "blocks", "an output has it", "",
         "A tensor of a capture has a deleter of its own."},
        {"a_replay_onto_a_stream_that_is_captured", "*", "launch:", "",
         "A replay onto a stream under capture is refused and the capture goes on; CUDA, asked by "
         "torch, breaks it."},
        {"one_graph_reads_what_another_one_made", "mempool", "out", "", shared},
        {"forward_and_backward_in_two_graphs", "mempool", "backward:", "", shared},
        {"tensors_outlive_their_graph", "mempool", "kept:", "", shared},
        {"twenty_failures_and_their_tensors", "mempool", "kept", "", shared},
    };
}

}  // namespace differential
