/*
 * VmmGraph for programs that keep torch's own graphs (torch.cuda.CUDAGraph, at::cuda::CUDAGraph): what stands around a capture and a replay
 * of theirs, as C functions. The Python package is made of these. C++ programs have CaptureScope in torch.hpp.
 *
 * In libvmmgraph_torch, beside the functions of vmmgraph.h, whose conventions hold: statuses, handles that are checked, outputs last.
 * Nothing throws or calls back.
 *
 *   vmmgraph_torch_install();
 *   vmmgraph_torch_shape_open(arena, &shape);
 *   for each graph of the shape, with its stream torch's current one:
 *     vmmgraph_torch_capture_begin(shape, pool);   graph.capture_begin(pool);   vmmgraph_torch_capture_begun(shape);
 *     the body
 *     graph.capture_end();   vmmgraph_torch_capture_end(shape, &captured, &result);
 *   vmmgraph_torch_shape_seal(shape, VMMGRAPH_RETAIN_DEFAULT, &report);
 *   vmmgraph_torch_replay(shape, result.piece);
 *
 * `pool` may be the same id for all captures of a program, which shares memory by the arena and not by the id, and a capture may end its
 * pool and begin it again to allocate from another one in between.
 */

#ifndef VMMGRAPH_TORCH_C_H
#define VMMGRAPH_TORCH_C_H

#include <stddef.h>
#include <stdint.h>

#include "vmmgraph.h"

#ifdef __cplusplus
extern "C" {
#endif

// A shape: one space, and the graphs that were captured into it, which are replayed in the order of their captures with nothing else of
// the arena between them, or each by itself where none reads what another one left. Calls with it are thread-safe.
typedef struct vmmgraph_torch_shape* vmmgraph_torch_shape_t;

// A graph of torch's whose capture has ended.
typedef struct vmmgraph_torch_graph_t {
    // sizeof(vmmgraph_torch_graph_t).
    size_t struct_size;
    // Its at::cuda::CUDAGraph, which stays there until vmmgraph_torch_drop; null: not known, it is replayed by its owner.
    void* graph;
    // The id of the pool it was captured into.
    uint64_t pool_first;
    uint64_t pool_second;
    // Its cudaGraph_t, if torch keeps it (raw_cuda_graph()); null: it does not.
    void* raw;
    // 1: it keeps its cudaGraph_t for us and was not instantiated: its executable is of the device's pool of executables.
    int32_t lend;
    // 1: fill kernels come in the place of the memset nodes of `raw`, which has not been instantiated.
    int32_t memset_kernels;
} vmmgraph_torch_graph_t;

// What became of it.
typedef struct vmmgraph_torch_captured_t {
    // Set to sizeof(vmmgraph_torch_captured_t) before the call.
    size_t struct_size;
    // Its number in the shape, from 0.
    uint64_t piece;
    // Memset nodes that became kernels.
    uint64_t memset_kernels;
    // 1: vmmgraph_torch_replay can replay it; 0: there is no graph of torch's release at `graph`, or none was given.
    int32_t replayable;
    // 1: its executable is of the device's pool; 0: torch instantiates it.
    int32_t lent;
} vmmgraph_torch_captured_t;

// A device's pool of executables: vmmgraph::torch::ExecutableStats.
typedef struct vmmgraph_torch_executables_t {
    // Set to sizeof(vmmgraph_torch_executables_t) before the call.
    size_t struct_size;
    // Limits: shapes that may have executables at a time, and bytes those may take; 0: no limit.
    uint64_t max_shapes;
    uint64_t max_bytes;
    // Shapes of the pool, and those that have executables now.
    uint64_t shapes;
    uint64_t instantiated;
    // Executables now, their nodes, and the nodes of all captured graphs.
    uint64_t executables;
    uint64_t nodes;
    uint64_t template_nodes;
    // Bytes of device memory that executables took, as measured when they were instantiated.
    uint64_t bytes;
    // Shapes that were instantiated, those of them ahead of a replay, and shapes whose executables were destroyed to make room.
    uint64_t instantiations;
    uint64_t ahead;
    uint64_t evictions;
    // Replays that found their executables ready, and replays that had to instantiate first.
    uint64_t hits;
    uint64_t misses;
} vmmgraph_torch_executables_t;

// The torch release the library was built for, as "2.11.0". Static; never fails, whatever torch is loaded.
VMMGRAPH_API const char* vmmgraph_torch_built_for(void);

// Why this thread's last call here failed, whichever component said so; empty after one that did not. Copies as
// vmmgraph_last_error_message does.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_last_error_message(char* buffer, size_t capacity, size_t* needed);

// vmmgraph::torch::install(), uninstall() and installed(): 1 or 0.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_install(void);
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_uninstall(void);
VMMGRAPH_API int32_t vmmgraph_torch_installed(void);

// Opens a shape in an arena of a CUDA device, which may be destroyed before the shape.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_open(vmmgraph_arena_t arena, vmmgraph_torch_shape_t* shape);
// Its space, which stays the shape's.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_space(vmmgraph_torch_shape_t shape, vmmgraph_space_t* space);
// Closes it; it goes when calls with it have returned. Its graphs must be gone, or never be launched again. Tensors of its captures stay
// valid.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_close(vmmgraph_torch_shape_t shape);

// Before torch's capture_begin() into the pool of that id, on its thread: the next pool that this thread begins to allocate to is the
// shape's. Torch's current stream of the arena's device is to be captured: VMMGRAPH_ERROR_INVALID_ARGUMENT if that is the default stream,
// VMMGRAPH_ERROR_STREAM_CAPTURING if it is captured already. VMMGRAPH_ERROR_INVALID_ARGUMENT also while another capture into the pool is under
// way. VMMGRAPH_ERROR_WRONG_STATE for a sealed shape, one that is being captured,
// before vmmgraph_torch_install, and for a pool that is torch's own: a MemPool, or one that graphs were captured into without us.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_begin(vmmgraph_torch_shape_t shape, uint64_t pool_first, uint64_t pool_second);
// Right after it, on the same thread. VMMGRAPH_ERROR_WRONG_STATE if torch asked no allocator of ours: the capture goes on in torch's own
// memory, and what was announced is taken back.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_begun(vmmgraph_torch_shape_t shape);
// After torch's capture_end(), on any thread.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_end(vmmgraph_torch_shape_t shape, const vmmgraph_torch_graph_t* graph,
                                                          vmmgraph_torch_captured_t* captured);
// After a capture_begin() or capture_end() of torch's that threw, into the pool of that id: ends what is left of the capture, so that torch
// and the arena go on. What was captured into the shape before stays. Does nothing where no capture is under way.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_abandon(vmmgraph_torch_shape_t shape, uint64_t pool_first, uint64_t pool_second);

// From here to the matching leave, what this thread allocates in captures of shapes are remote blocks: vmmgraph::torch::RemoteScope of torch.hpp,
// which says what they are for. May be nested; without effect outside captures.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_remote_enter(void);
// VMMGRAPH_ERROR_WRONG_STATE where this thread has entered none.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_remote_leave(void);

// From here to the matching leave, what this thread allocates on torch's current stream of the arena's device lies on the arena's shared pages,
// ordered as one replay of it: vmmgraph::torch::EagerScope of torch_eager.hpp, with its rules and refusals. Neither changes torch's current
// stream or device. May be nested for different arenas.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_enter(vmmgraph_arena_t arena);
// As vmmgraph_torch_eager_enter, of so many bytes at once at most: pages of the arena that are on lease stay there if that does without them.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_enter_of(vmmgraph_arena_t arena, uint64_t bytes);
// Ends the innermost of this thread's. VMMGRAPH_ERROR_WRONG_STATE where it has entered none, or others have ended all.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_leave(void);
// Ends this thread's scope of the arena, whether others are within it or not. Does nothing where it has none: for a program that may be interrupted as
// an enter or a leave returns, and cannot know.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_leave_of(vmmgraph_arena_t arena);
// Ends the one that the arena has, whichever thread entered it: for a program in which whoever comes to the end is not always that thread, as
// where a collector closes what was left open. What that thread makes afterwards is torch's. VMMGRAPH_ERROR_WRONG_STATE where the arena has
// none, and on another thread than the scope's if that is on its thread's default stream (cudaStreamPerThread).
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_end(vmmgraph_arena_t arena);

// Gives what torch has in a pool of its own back to the driver, and leaves that pool empty and in use as before: for a MemPool whose captures
// and eager work are to be an arena's from now on. Workspaces of cuBLAS that lie there leave torch's tables. To be called outside captures.
// VMMGRAPH_ERROR_WRONG_STATE, with nothing else changed: something in it is alive, graphs or another thread use it too, or something is captured or
// allocated to a pool on the device. VMMGRAPH_ERROR_UNSUPPORTED: torch 2.6 and 2.7. VMMGRAPH_ERROR_INTERNAL: another thread began just now, and
// the pool must never be used or released again.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_pool_empty(int32_t device, uint64_t pool_first, uint64_t pool_second);

// Ends the shape: no more is captured into it, and it can be replayed. Tensors that are live are treated as `retain` says
// (VMMGRAPH_RETAIN_*), and keep what the program wrote there since the capture on torch's current stream of the device, on the default one and on those
// that were captured, by copies; what other streams are at work on must be over. No tensor goes meanwhile, whoever frees it.
// `report` may be null. On failure it can be called again. Sealed already: does nothing, and reports what it was.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_seal(vmmgraph_torch_shape_t shape, int32_t retain, vmmgraph_seal_report_t* report);
// The same right behind the end of its only capture, by the arena's own policy, while nobody has written to its tensors: nothing is copied, and what the
// program writes from then on meets no seal.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_seal_unwritten(vmmgraph_torch_shape_t shape, vmmgraph_seal_report_t* report);

// Instantiates the graphs of a sealed shape ahead of their first replay, which takes the device memory of their executables now. `instantiated`
// (may be null) is 0 where the limits leave no room without evicting a shape that was replayed last. On out of memory nothing is changed.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_shape_instantiate(vmmgraph_torch_shape_t shape, int32_t* instantiated);

// Launches a graph of a sealed shape on torch's current stream of its device, in order after every earlier replay of the arena, as torch's
// replay() does: random generators go on. Any thread. VMMGRAPH_ERROR_WRONG_STATE for one that is not replayable here, which its owner
// launches between vmmgraph_space_enter and vmmgraph_space_leave.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_replay(vmmgraph_torch_shape_t shape, uint64_t piece);
// Before somebody launches a graph of the shape in any other way than these, from its cudaGraph_t or an executable of his own. Until then, until the
// first replay and until the device's next capture, whose graph may read it, a tensor of a sealed shape that goes leaves no page of its own in it: the pages from before the seal come back, behind the streams that were
// captured, the default one, torch's current one and those it was recorded for.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_launched_by_hand(vmmgraph_torch_shape_t shape);
// As vmmgraph_space_verify, of one graph on torch's current stream.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_verify(vmmgraph_torch_shape_t shape, uint64_t piece, const vmmgraph_output_t* outputs,
                                                     size_t count, vmmgraph_difference_t* difference);
// Before a graph is reset or destroyed, or gets an executable of its own: the pool's is destroyed.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_drop(vmmgraph_torch_shape_t shape, uint64_t piece);
// From now on torch's own executable is launched, whoever made it.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_keep(vmmgraph_torch_shape_t shape, uint64_t piece);

// Limits of the pool of executables of the arena's device, which all shapes of the device share; 0: no limit. Executables beyond them are
// destroyed by least recent use. VMMGRAPH_ERROR_UNSUPPORTED up to torch 2.7.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_set_executable_limits(vmmgraph_arena_t arena, uint64_t max_shapes, uint64_t max_bytes);
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_executable_stats(vmmgraph_arena_t arena, vmmgraph_torch_executables_t* stats);
#ifdef __cplusplus
}
#endif

#endif  // VMMGRAPH_TORCH_C_H
