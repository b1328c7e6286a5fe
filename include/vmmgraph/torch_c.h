/*
 * VmmGraph for torch's own graphs (torch.cuda.CUDAGraph, at::cuda::CUDAGraph): C functions around
 * their captures and replays. Used by the Python package. C++ programs use CaptureScope of
 * torch.hpp.
 *
 * Part of libvmmgraph_torch, with the conventions of vmmgraph.h: statuses, checked handles, outputs
 * last. Nothing throws or calls back.
 *
 *   vmmgraph_torch_install();
 *   vmmgraph_torch_group_open(arena, &group);
 *   for each graph of the group, with its stream torch's current one:
 *     vmmgraph_torch_capture_begin(group, pool, 0);
 *     graph.capture_begin(pool);
 *     vmmgraph_torch_capture_begun(group);
 *     the body
 *     graph.capture_end();
 *     vmmgraph_torch_capture_end(group, &captured, &result);
 *   vmmgraph_torch_group_seal(group, VMMGRAPH_RETAIN_DEFAULT, &report);
 *   vmmgraph_torch_replay(group, result.piece);
 *
 * `pool` may be one id for all captures of a program: memory is shared through the arena, not
 * through the id. A capture may leave its pool and begin again, to allocate from another pool in
 * between.
 */

#ifndef VMMGRAPH_TORCH_C_H
#define VMMGRAPH_TORCH_C_H

#include <stddef.h>
#include <stdint.h>

#include "vmmgraph.h"

#ifdef __cplusplus
extern "C" {
#endif

// A graph group: one space and the graphs captured into this space. Graphs are replayed in
// capture order with no other graph of the arena in between, or singly if none reads another's
// results. Calls are thread-safe.
typedef struct vmmgraph_torch_group* vmmgraph_torch_group_t;

// A torch graph after its capture.
typedef struct vmmgraph_torch_graph_t {
    // sizeof(vmmgraph_torch_graph_t).
    size_t struct_size;
    // Its at::cuda::CUDAGraph, valid until vmmgraph_torch_drop; null: unknown, its owner replays.
    void* graph;
    // Id of the capture's pool.
    uint64_t pool_first;
    uint64_t pool_second;
    // Its cudaGraph_t, if torch keeps one (raw_cuda_graph()); else null.
    void* raw;
    // 1: torch keeps the cudaGraph_t and has not instantiated the graph; the device's pool makes
    // the executable.
    int32_t lend;
    // 1: fill kernels replace the memset nodes of `raw`, which is not instantiated.
    int32_t memset_kernels;
} vmmgraph_torch_graph_t;

// Result of a capture.
typedef struct vmmgraph_torch_captured_t {
    // Set to sizeof(vmmgraph_torch_captured_t) before the call.
    size_t struct_size;
    // Index in the graph group, from 0.
    uint64_t piece;
    // Memset nodes replaced by kernels.
    uint64_t memset_kernels;
    // 1: vmmgraph_torch_replay can replay the graph; 0: `graph` is null, or no graph of the torch
    // release of this build.
    int32_t replayable;
    // 1: the device's pool makes the executable; 0: torch does.
    int32_t lent;
} vmmgraph_torch_captured_t;

// Statistics of a device's pool of executables: see vmmgraph::torch::ExecutableStats.
typedef struct vmmgraph_torch_executables_t {
    // Set to sizeof(vmmgraph_torch_executables_t) before the call.
    size_t struct_size;
    // Limits: graph groups with executables at a time, and bytes of these executables; 0: no limit.
    uint64_t max_groups;
    uint64_t max_bytes;
    // Graph groups of the pool, and those with executables now.
    uint64_t groups;
    uint64_t instantiated;
    // Executables now, their nodes, and the nodes of all captured graphs.
    uint64_t executables;
    uint64_t nodes;
    uint64_t template_nodes;
    // Device memory of executables in bytes, measured at instantiation.
    uint64_t bytes;
    // Groups instantiated, those ahead of a replay, and groups evicted for room.
    uint64_t instantiations;
    uint64_t ahead;
    uint64_t evictions;
    // Replays with ready executables, and replays which had to instantiate first.
    uint64_t hits;
    uint64_t misses;
} vmmgraph_torch_executables_t;

// The torch release of this build, as "2.11.0". Static; never fails, with any torch.
VMMGRAPH_API const char* vmmgraph_torch_built_for(void);

// Message of the failure of this thread's last call here; empty after a success. Copies as
// vmmgraph_last_error_message.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_last_error_message(char* buffer, size_t capacity,
                                                                 size_t* needed);

// See vmmgraph::torch::install(), uninstall() and installed(), which is 1 or 0.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_install(void);
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_uninstall(void);
VMMGRAPH_API int32_t vmmgraph_torch_installed(void);

// Opens a graph group in an arena of a CUDA device. The arena may be destroyed first.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_open(vmmgraph_arena_t arena,
                                                         vmmgraph_torch_group_t* group);
// Returns the group's space, owned by the group.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_space(vmmgraph_torch_group_t group,
                                                          vmmgraph_space_t* space);
// Closes the group, once running calls have returned. Its graphs must be destroyed, or never be
// launched again. Tensors of its captures stay valid.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_close(vmmgraph_torch_group_t group);

// Call before torch's capture_begin() into this pool, on the same thread: the next pool begun by
// this thread becomes the group's. The stream to capture must be torch's current stream of the
// arena's device. VMMGRAPH_ERROR_INVALID_ARGUMENT: the default stream, or another capture into the
// pool is running. VMMGRAPH_ERROR_STREAM_CAPTURING: the stream is under capture.
// VMMGRAPH_ERROR_WRONG_STATE: a sealed group or one being captured, no vmmgraph_torch_install, or a
// pool of torch's own: a MemPool, or one with graphs captured without this library.
// `free_workspace` 1: frees the cuBLAS workspace of earlier eager work on the stream, 32 MiB on an
// H200; later eager work makes another. Only if no graph in torch's memory contains its address.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_begin(vmmgraph_torch_group_t group,
                                                            uint64_t pool_first,
                                                            uint64_t pool_second,
                                                            int32_t free_workspace);
// Call after torch's capture_begin(), on the same thread. VMMGRAPH_ERROR_WRONG_STATE if torch did
// not ask this library's allocator: the capture continues in torch's memory, and the announcement
// is withdrawn.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_begun(vmmgraph_torch_group_t group);
// Call after torch's capture_end(), on any thread.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_end(vmmgraph_torch_group_t group,
                                                          const vmmgraph_torch_graph_t* graph,
                                                          vmmgraph_torch_captured_t* captured);
// Call after torch's capture_begin() or capture_end() into this pool threw: ends the rest of the
// capture, so torch and the arena stay usable. Earlier captures of the group are kept. No effect
// without a running capture.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_capture_abandon(vmmgraph_torch_group_t group,
                                                              uint64_t pool_first,
                                                              uint64_t pool_second);

// Until the matching leave, this thread's allocations in captures of graph groups are peer-visible
// (remote) blocks: see vmmgraph::torch::RemoteScope. May be nested; no effect outside captures.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_remote_enter(void);
// VMMGRAPH_ERROR_WRONG_STATE if this thread has entered none.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_remote_leave(void);

// Until the matching leave, this thread's allocations on torch's current stream of the arena's
// device lie on the arena's shared pages, as one replay. Rules and errors:
// vmmgraph::torch::EagerScope (torch_eager.hpp). Does not change torch's current stream or device.
// May be nested for different arenas.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_enter(vmmgraph_arena_t arena);
// As vmmgraph_torch_eager_enter, for at most `bytes` at once: leased pages of the arena not needed
// for this amount stay on lease.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_enter_of(vmmgraph_arena_t arena,
                                                             uint64_t bytes);
// Ends this thread's innermost scope. VMMGRAPH_ERROR_WRONG_STATE if this thread has none, or if all
// have been ended by other threads.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_leave(void);
// Ends this thread's scope of the arena, even with scopes inside; no effect without one. For
// programs which may be interrupted when an enter or leave returns.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_leave_of(vmmgraph_arena_t arena);
// Ends the arena's scope, whichever thread entered: for programs in which a garbage collector
// closes scopes. Later allocations of the scope's thread are torch's. VMMGRAPH_ERROR_WRONG_STATE
// without a scope, and on another thread if the scope is on its thread's default stream
// (cudaStreamPerThread).
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_eager_end(vmmgraph_arena_t arena);

// Returns a torch pool's memory to the driver and leaves the pool empty and in use, for a MemPool
// whose captures and eager work move to an arena. cuBLAS workspaces in the pool leave torch's
// tables. Call outside captures. VMMGRAPH_ERROR_WRONG_STATE, with nothing else changed: live memory
// in the pool, use by graphs or another thread, or a capture or pool allocation on the device.
// VMMGRAPH_ERROR_UNSUPPORTED: torch 2.6 and 2.7. VMMGRAPH_ERROR_INTERNAL: another thread began
// meanwhile; never use or release the pool again.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_pool_empty(int32_t device, uint64_t pool_first,
                                                         uint64_t pool_second);

// Seals the group: no more captures, and replays may begin. Live tensors follow `retain`
// (VMMGRAPH_RETAIN_*). Copies preserve bytes written since the capture on torch's current stream of
// the device, the default stream and the captured streams; work on other streams must be over.
// Frees of these tensors wait meanwhile. `report` may be null. Can be repeated after a failure; a
// sealed group only reports.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_seal(vmmgraph_torch_group_t group,
                                                         int32_t retain,
                                                         vmmgraph_seal_report_t* report);
// As vmmgraph_torch_group_seal with the arena's policy, right after the group's only capture and
// before any write to its tensors: copies nothing.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_seal_unwritten(vmmgraph_torch_group_t group,
                                                                   vmmgraph_seal_report_t* report);

// Instantiates the graphs of a sealed group ahead of their first replay, which takes the
// executables' device memory now. `instantiated` (may be null) is 0 if the limits would evict a
// group replayed last. On out of memory nothing has changed.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_group_instantiate(vmmgraph_torch_group_t group,
                                                                int32_t* instantiated);

// Replays a graph of a sealed group on torch's current stream of its device, ordered after every
// earlier replay of the arena. Advances random generators, as torch's replay(). Any thread.
// VMMGRAPH_ERROR_WRONG_STATE if not replayable here: its owner must launch the graph between
// vmmgraph_space_enter and vmmgraph_space_leave.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_replay(vmmgraph_torch_group_t group, uint64_t piece);
// Call before launching a graph of the group in any other way: from its cudaGraph_t, or by another
// executable. Before this call, the first replay, and the device's next capture (whose graph may
// read the tensor), a free of a sealed group's tensor restores the pages from before the seal and
// leaves no page of its own. The restore follows the captured streams, the default stream, torch's
// current stream and the tensor's recorded streams.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_launched_by_hand(vmmgraph_torch_group_t group);
// As vmmgraph_space_verify, for one graph on torch's current stream.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_verify(vmmgraph_torch_group_t group, uint64_t piece,
                                                     const vmmgraph_output_t* outputs, size_t count,
                                                     vmmgraph_difference_t* difference);
// Call before a graph is reset or destroyed, or gets its own executable: destroys the pool's
// executable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_drop(vmmgraph_torch_group_t group, uint64_t piece);
// Launches torch's own executable from now on.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_keep(vmmgraph_torch_group_t group, uint64_t piece);

// Limits the pool of executables of the arena's device, shared by all graph groups; 0: no limit.
// The least recently used executables beyond the limits are destroyed. VMMGRAPH_ERROR_UNSUPPORTED
// up to torch 2.7.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_set_executable_limits(vmmgraph_arena_t arena,
                                                                    uint64_t max_groups,
                                                                    uint64_t max_bytes);
// Destroys all executables of the arena's device, except pinned ones and while being launched.
// Replays and vmmgraph_torch_group_instantiate make them again. VMMGRAPH_ERROR_UNSUPPORTED up to
// torch 2.7.
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_evict_executables(vmmgraph_arena_t arena);
VMMGRAPH_API vmmgraph_status_t vmmgraph_torch_executable_stats(vmmgraph_arena_t arena,
                                                               vmmgraph_torch_executables_t* stats);
#ifdef __cplusplus
}
#endif

#endif  // VMMGRAPH_TORCH_C_H
