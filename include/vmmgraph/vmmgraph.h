/*
 * VmmGraph: GPU memory for graph-mode LLM engines.
 *
 * Written by cbindgen from src/capi; do not edit (make header).
 *
 * Conventions
 *   - Every function that can fail returns a vmmgraph_status_t: VMMGRAPH_OK (0) or a VMMGRAPH_ERROR. Outputs come last and are
 *     untouched on failure. vmmgraph_last_error and vmmgraph_last_error_message tell more, for the calling thread.
 *   - Nothing aborts, exits or throws. Out of memory leaves everything usable.
 *   - Handles are checked keys, not addresses: a destroyed, foreign or null handle is VMMGRAPH_ERROR_INVALID_HANDLE.
 *   - Structs begin with struct_size (but those that come in arrays and never grow: keys, extents, planned buckets). Zero a struct,
 *     set struct_size to its sizeof, and then what differs from the default.
 *   - Structs only grow at the end, so a program may be built with an older or newer header of the same ABI version than the library.
 *     Of a shorter struct, only its struct_size bytes are read or written: an option that is not there has its default, which is 0.
 *     Of a longer one, options that the library does not know must be 0, or the call fails with VMMGRAPH_ERROR_STRUCT_SIZE; what the
 *     library does not know of a struct to be filled stays as it is. struct_size itself is never written. Sizes that no struct has
 *     (below 16, above 4096, no multiple of 8) are VMMGRAPH_ERROR_STRUCT_SIZE. Structs with a struct_size that come in an array have
 *     all the same.
 *   - A child made by fork after a device was opened gets VMMGRAPH_ERROR_WRONG_STATE from every function but those that explain a
 *     failure. It may exit in any way, and exec. Do not touch blocks there: host memory is shared with the parent.
 *   - Sizes are bytes. Streams are CUstream or cudaStream_t; null is the default stream, while a green context of the device is current
 *     that context's. All functions are thread-safe.
 */


#ifndef VMMGRAPH_H
#define VMMGRAPH_H

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define VMMGRAPH_API
#else
#define VMMGRAPH_API __attribute__((visibility("default")))
#endif

#define VMMGRAPH_VERSION_MAJOR 0
#define VMMGRAPH_VERSION_MINOR 1
#define VMMGRAPH_VERSION_PATCH 0


// Version of the C ABI: calls, structs and numbers of the same ABI version work together.
#define VMMGRAPH_ABI_VERSION 1

// The call did what it says.
#define VMMGRAPH_OK 0

// A pointer that must not be null is null.
#define VMMGRAPH_ERROR_NULL_ARGUMENT 1

// A number is outside its domain.
#define VMMGRAPH_ERROR_INVALID_ARGUMENT 2

// A size is zero or beyond 2^46 bytes, or a page size does not fit the device.
#define VMMGRAPH_ERROR_INVALID_SIZE 3

// A handle was destroyed, is of another kind, or never was one.
#define VMMGRAPH_ERROR_INVALID_HANDLE 4

// The driver has no device of that number.
#define VMMGRAPH_ERROR_INVALID_DEVICE 5

// A pointer is not the start of a live block.
#define VMMGRAPH_ERROR_FOREIGN_POINTER 6

// A block was freed before.
#define VMMGRAPH_ERROR_DOUBLE_FREE 7

// A struct_size is none that a struct can have, or the struct sets fields that this library does not know.
#define VMMGRAPH_ERROR_STRUCT_SIZE 8

// The library that is loaded has another ABI version than the header (the C++ API checks this).
#define VMMGRAPH_ERROR_ABI_MISMATCH 9

// The object is in another state than the call needs.
#define VMMGRAPH_ERROR_WRONG_STATE 100

// The object was closed by an earlier internal error; it can only be destroyed.
#define VMMGRAPH_ERROR_CLOSED 101

// The device is open with other settings.
#define VMMGRAPH_ERROR_DEVICE_IN_USE 102

// The stream of the last replay is being captured; or something is, on a platform where nobody may wait for the device then.
#define VMMGRAPH_ERROR_STREAM_CAPTURING 103

// Ranks that compare their replays had different ones; vmmgraph_last_error_message names the first.
#define VMMGRAPH_ERROR_RANKS_DIFFER 104

// The device's memory is used up. Nothing has changed.
#define VMMGRAPH_ERROR_OUT_OF_MEMORY 200

// The byte budget of the device or of the arena is used up; vmmgraph_last_error_message says whose. Nothing has changed.
#define VMMGRAPH_ERROR_OVER_BUDGET 201

// No address range of that length is left. Nothing has changed.
#define VMMGRAPH_ERROR_OUT_OF_ADDRESSES 202

// The process has no file descriptor left (host driver). Nothing has changed.
#define VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS 203

// No host memory is left for contents: the host pool's limit is reached, or the machine has no more.
#define VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY 204

// The driver refused a call; vmmgraph_last_error names the call and its result.
#define VMMGRAPH_ERROR_DRIVER 300

// The driver's library cannot be loaded.
#define VMMGRAPH_ERROR_DRIVER_MISSING 301

// The driver's library is too old, or not one that this library works with.
#define VMMGRAPH_ERROR_DRIVER_TOO_OLD 302

// The device has no virtual memory management, or does not offer what the call needs.
#define VMMGRAPH_ERROR_UNSUPPORTED 303

// Host memory could not be registered with the device (pinned), and the call takes no other.
#define VMMGRAPH_ERROR_HOST_NOT_REGISTERED 304

// A bug in the library; the arena is closed, the process goes on.
#define VMMGRAPH_ERROR_INTERNAL 900

// Nothing is to be done.
#define VMMGRAPH_AHEAD_NOTHING 0

// So many more blocks are to be committed.
#define VMMGRAPH_AHEAD_COMMIT 1

// The memory of so many free blocks is to be given back.
#define VMMGRAPH_AHEAD_GIVE_BACK 2

// The arena's policy; in an arena's options: VMMGRAPH_RETAIN_OWN_PAGES.
#define VMMGRAPH_RETAIN_DEFAULT 0

// Blocks that are live at the seal move to pages of their own: other graphs never touch them.
#define VMMGRAPH_RETAIN_OWN_PAGES 1

// Blocks that are live at the seal stay on shared pages: the next replay of another graph may overwrite them.
#define VMMGRAPH_RETAIN_SHARED_PAGES 2

// The pages of blocks that are live at the seal become the space's own as they are, and none is exchanged for another; where another
// space, or another part of this one, shows such a page, the seal is VMMGRAPH_ERROR_WRONG_STATE. For captures of whose pages somebody
// else has taken hold, as NCCL does when it registers the buffers of captured collectives.
#define VMMGRAPH_RETAIN_IN_PLACE 3

// As VMMGRAPH_RETAIN_OWN_PAGES, but for remote blocks, which stay where they are, on shared pages: the next replay of another graph may overwrite
// them. For peers that were told of their pages during the capture.
#define VMMGRAPH_RETAIN_SHARED_REMOTE 4

// Fills the shared pages of a space before each of its replays, so that a graph which relies on what is left there shows. Also on
// with VMMGRAPH_POISON=1 in the environment.
#define VMMGRAPH_ARENA_POISON 1

// Blocks remember when and by which call stack they were allocated, for vmmgraph_space_blocks_json. Also on with
// VMMGRAPH_TRACE_BLOCKS=1 in the environment.
#define VMMGRAPH_ARENA_TRACE_BLOCKS 2

// Replays and eager scopes on another stream or another thread than the first one's are VMMGRAPH_ERROR_WRONG_STATE before anything of them is
// prepared or recorded, until vmmgraph_arena_lift_serial. For ranks that work together: the waits between streams that order an arena's
// replays can deadlock ranks that replay in different orders.
#define VMMGRAPH_ARENA_SERIAL 4

// Each replay is noted, for ranks to compare what they launched by vmmgraph_arena_compare_order. Also on with VMMGRAPH_CHECK_ORDER=1 in the
// environment.
#define VMMGRAPH_ARENA_CHECK_ORDER 8

// Choose by VMMGRAPH_DRIVER (cuda, hip, ascend, mlu or host) if set; else the first of these with a usable device.
#define VMMGRAPH_DRIVER_AUTO 0

// CUDA, or an error that says what is missing.
#define VMMGRAPH_DRIVER_CUDA 1

// This machine's memory; addresses are ordinary pointers of this process.
#define VMMGRAPH_DRIVER_HOST 2

// HIP on AMD GPUs, ROCm 6.2 and newer, or an error that says what is missing. Never run on a device: see README.
#define VMMGRAPH_DRIVER_HIP 3

// Ascend NPUs by CANN's ACL runtime, 8.5 and newer, or an error that says what is missing. Never run on a device: see README.
#define VMMGRAPH_DRIVER_ASCEND 4

// Cambricon MLUs by CNDrv 2.15, or an error that says what is missing. Never run on a device, nor held against the vendor's header: see
// README.
#define VMMGRAPH_DRIVER_MLU 5

// Pages stay in this process.
#define VMMGRAPH_SHARING_NONE 0

// Pages can be exported as POSIX file descriptors, one a page; none is taken before. Not on HIP, Ascend and MLU.
#define VMMGRAPH_SHARING_FD 1

// As VMMGRAPH_SHARING_FD, and by handles of the fabric, which reach other hosts, where the device makes one when it is opened.
#define VMMGRAPH_SHARING_FABRIC 2

// Options only: decode tries full graphs, then piecewise ones; the other phases piecewise ones.
#define VMMGRAPH_MODE_DEFAULT 0

// No graph.
#define VMMGRAPH_MODE_EAGER 1

// Graphs between the attention calls.
#define VMMGRAPH_MODE_PIECEWISE 2

// One graph.
#define VMMGRAPH_MODE_FULL 3

// All sequences decode.
#define VMMGRAPH_PHASE_DECODE 0

// All sequences prefill.
#define VMMGRAPH_PHASE_PREFILL 1

// Some of each.
#define VMMGRAPH_PHASE_MIXED 2

// A graph of exactly this shape is there.
#define VMMGRAPH_REASON_HIT 0

// A graph of a larger shape is there.
#define VMMGRAPH_REASON_PADDED 1

// A graph was captured for this step, or is to be.
#define VMMGRAPH_REASON_CAPTURED 2

// Eager: the options say so for this phase.
#define VMMGRAPH_REASON_MODE_EAGER 3

// Eager: more tokens than most_tokens.
#define VMMGRAPH_REASON_ABOVE_THRESHOLD 4

// Eager: no bucket covers the step.
#define VMMGRAPH_REASON_TOO_LARGE 5

// Eager: the caller says that this step cannot be in a graph.
#define VMMGRAPH_REASON_NOT_CAPTURABLE 6

// Eager: the graph is not there, and graphs are not captured while serving.
#define VMMGRAPH_REASON_NOT_CAPTURED 7

// Eager: the graph is being captured elsewhere.
#define VMMGRAPH_REASON_BEING_CAPTURED 8

// Eager: most_graphs are there.
#define VMMGRAPH_REASON_BUDGET 9

// Eager: capturing this bucket failed, now or before.
#define VMMGRAPH_REASON_CAPTURE_FAILED 10

// The graph of this shape is not there, and a larger one that is runs the step.
#define VMMGRAPH_REASON_STAND_IN 11

// A capture ahead of traffic begins. The slot is the caller's until the capture is reported as done, failed or abandoned.
#define VMMGRAPH_GRAPH_BEGIN 0

// The graph is there.
#define VMMGRAPH_GRAPH_CAPTURED 1

// The capture failed: its step runs eagerly, and the bucket has no graph until it is forgiven.
#define VMMGRAPH_GRAPH_FAILED 2

// The graph was dropped; it may be captured again.
#define VMMGRAPH_GRAPH_EVICTED 3

// A failed bucket may be tried again.
#define VMMGRAPH_GRAPH_FORGIVEN 4

// The capture did not come about: all is as before it, and its step is counted when it comes again.
#define VMMGRAPH_GRAPH_ABANDONED 5

// A step runs by this graph, or with UINT32_MAX for a slot eagerly, because others decided so: ranks that have to run it the same way.
// Counted beside what was decided for it here; the graph counts as used.
#define VMMGRAPH_GRAPH_IMPOSED 6

// Both are the step's now.
#define VMMGRAPH_GRANT_GRANTED 0

// Neither; it keeps its place, and is to ask again when something came back.
#define VMMGRAPH_GRANT_NOT_NOW 1

// There are not so many pages, and it waits no more.
#define VMMGRAPH_GRANT_NEVER 2

// Host memory that cannot be registered with the device is VMMGRAPH_ERROR_HOST_NOT_REGISTERED. Never falls back silently.
#define VMMGRAPH_PINNING_REQUIRED 0

// It will do: copies go over the host pool's ring of small registered buffers then, and the caller of an acquire waits for each.
#define VMMGRAPH_PINNING_PREFERRED 1

// The size stays.
#define VMMGRAPH_SLO_KEEP 0

// It is twice as much now: first tokens were late.
#define VMMGRAPH_SLO_RAISED 1

// It is half as much now: later tokens were late.
#define VMMGRAPH_SLO_LOWERED 2

// Written by the host before every step; travels with the other host inputs in one copy.
#define VMMGRAPH_ROLE_HOST_INPUT 0

// Written by the device before the graph runs.
#define VMMGRAPH_ROLE_DEVICE_INPUT 1

// Written by the graph.
#define VMMGRAPH_ROLE_OUTPUT 2

// Missing elements are 0.
#define VMMGRAPH_PAD_ZERO 0

// Missing elements are the nearest one that the step has, in every dimension.
#define VMMGRAPH_PAD_REPEAT_LAST 1

// Missing elements are pad_bits.
#define VMMGRAPH_PAD_VALUE 2

// Always `times` long.
#define VMMGRAPH_EXTENT_FIXED 0

// `times` the bucket's size along `axis`, plus `plus`.
#define VMMGRAPH_EXTENT_ALONG 1

// At most `times` long, as each step needs it; the first dimension only. The rest is neither padded nor copied.
#define VMMGRAPH_EXTENT_UP_TO 2

// One byte: false or true.
#define VMMGRAPH_DTYPE_BOOL 0

// Unsigned, 8 bits.
#define VMMGRAPH_DTYPE_U8 1

// Signed, 8 bits.
#define VMMGRAPH_DTYPE_I8 2

// Signed, 16 bits.
#define VMMGRAPH_DTYPE_I16 3

// Signed, 32 bits.
#define VMMGRAPH_DTYPE_I32 4

// Signed, 64 bits.
#define VMMGRAPH_DTYPE_I64 5

// IEEE half.
#define VMMGRAPH_DTYPE_F16 6

// bfloat16.
#define VMMGRAPH_DTYPE_BF16 7

// IEEE single.
#define VMMGRAPH_DTYPE_F32 8

// IEEE double.
#define VMMGRAPH_DTYPE_F64 9

// Any float of 8 bits.
#define VMMGRAPH_DTYPE_F8 10

// Each plane has addresses of its own, its blocks behind one another.
#define VMMGRAPH_KV_BY_PLANE 0

// One range of addresses, block after block, in each the planes behind one another: a range of blocks takes the fewest mappings.
#define VMMGRAPH_KV_BY_BLOCK 1

// The limit holds, and no block beyond it has memory.
#define VMMGRAPH_LIMIT_APPLIED 0

// It holds for all that is granted from now on; blocks beyond it have memory until they are released.
#define VMMGRAPH_LIMIT_DEFERRED 1

// A later revision is known: ignored.
#define VMMGRAPH_LIMIT_STALE 2

// This revision said something else before: ignored.
#define VMMGRAPH_LIMIT_CONFLICT 3

// Nothing is logged.
#define VMMGRAPH_LOG_OFF 0

// A failure that could not be undone.
#define VMMGRAPH_LOG_ERROR 1

// A failure that was undone, or memory that could not be given back.
#define VMMGRAPH_LOG_WARN 2

// Devices and arenas come and go.
#define VMMGRAPH_LOG_INFO 3

// Captures, and what they used.
#define VMMGRAPH_LOG_DEBUG 4

// Everything.
#define VMMGRAPH_LOG_TRACE 5

// Bytes that vmmgraph_arena_compare_order and vmmgraph_arena_agree_on have gathered from each rank.
#define VMMGRAPH_ORDER_DIGEST_BYTES 2080

// Nothing was copied.
#define VMMGRAPH_COPY_NONE 0

// From and to registered host memory, at the link's speed.
#define VMMGRAPH_COPY_REGISTERED 1

// Registration was refused: over a ring of small registered buffers.
#define VMMGRAPH_COPY_RING 2

// Not even those: as the driver copies pageable memory.
#define VMMGRAPH_COPY_PAGEABLE 3

// The list of xLLM: 1, 2, 4, 8, then multiples of 16 up to the first that holds `max`.
#define VMMGRAPH_SIZES_XLLM 0

// The default list of vLLM: 1, 2, 4, multiples of 8 below 256, then multiples of 16 up to `max`.
#define VMMGRAPH_SIZES_VLLM 1

// Of VMMGRAPH_LIMITED_BY: no part of the budget limits the number of graphs.
#define VMMGRAPH_LIMITED_BY_NOTHING 0

// most_graphs does.
#define VMMGRAPH_LIMITED_BY_GRAPHS 1

// streams does.
#define VMMGRAPH_LIMITED_BY_STREAMS 2

// most_graph_bytes does.
#define VMMGRAPH_LIMITED_BY_GRAPH_BYTES 3

// In a block's policy: the region's. In a region's: VMMGRAPH_POLICY_DISCARD.
#define VMMGRAPH_POLICY_DEFAULT 0

// The contents are lost when memory steps aside: what comes back holds anything.
#define VMMGRAPH_POLICY_DISCARD 1

// What comes back is zero.
#define VMMGRAPH_POLICY_ZERO 2

// The contents go to host memory and come back.
#define VMMGRAPH_POLICY_BACKUP 3

// The memory stays.
#define VMMGRAPH_POLICY_KEEP 4

// The blocks are written once, before the first pause: the host keeps what it copied then, and later pauses copy nothing. What is
// written later all the same is to be said by vmmgraph_region_mark_written.
#define VMMGRAPH_REGION_READ_ONLY 1

// For finding bugs: a pause copies all the same, and compares with what the host has. Costs the copy.
#define VMMGRAPH_REGION_VERIFY_CLEAN 2

// Nothing is copied ahead for the next step, since its sources will be others.
#define VMMGRAPH_RING_WITHIN_STEP 1

// Of a ring's units that its slots do not divide, as many as are too many stay on the device, evenly spread.
#define VMMGRAPH_REMAINDER_KEEP_RESIDENT 0

// They are VMMGRAPH_ERROR_INVALID_ARGUMENT.
#define VMMGRAPH_REMAINDER_REFUSE 1

// The copies take longer than the work.
#define VMMGRAPH_BOUND_LINK 0

// The work takes longer: streaming costs nothing.
#define VMMGRAPH_BOUND_COMPUTE 1

// Being captured: blocks may be allocated.
#define VMMGRAPH_SPACE_OPEN 0

// Captured: it may be replayed.
#define VMMGRAPH_SPACE_SEALED 1

// Undoing a failed driver call failed as well: it can only be destroyed.
#define VMMGRAPH_SPACE_BROKEN 2

// Its graph is gone; only what lies under live blocks is left.
#define VMMGRAPH_SPACE_RETIRED 3

// Never defined: a vmmgraph_account_t is a key, not an address.
typedef struct vmmgraph_account vmmgraph_account;

// Never defined: a vmmgraph_arena_t is a key, not an address.
typedef struct vmmgraph_arena vmmgraph_arena;

// Never defined: a vmmgraph_block_pool_t is a key, not an address.
typedef struct vmmgraph_block_pool vmmgraph_block_pool;

// Never defined: a vmmgraph_device_t is a key, not an address.
typedef struct vmmgraph_device vmmgraph_device;

// Never defined: a vmmgraph_dispatcher_t is a key, not an address.
typedef struct vmmgraph_dispatcher vmmgraph_dispatcher;

// Never defined: a vmmgraph_elastic_buffer_t is a key, not an address.
typedef struct vmmgraph_elastic_buffer vmmgraph_elastic_buffer;

// Never defined: a vmmgraph_elastic_observer_t is a key, not an address.
typedef struct vmmgraph_elastic_observer vmmgraph_elastic_observer;

// Never defined: a vmmgraph_grants_t is a key, not an address.
typedef struct vmmgraph_grants vmmgraph_grants;

// Never defined: a vmmgraph_host_buffer_t is a key, not an address.
typedef struct vmmgraph_host_buffer vmmgraph_host_buffer;

// Never defined: a vmmgraph_host_kv_t is a key, not an address.
typedef struct vmmgraph_host_kv vmmgraph_host_kv;

// Never defined: a vmmgraph_input_plan_t is a key, not an address.
typedef struct vmmgraph_input_plan vmmgraph_input_plan;

// Never defined: a vmmgraph_kv_cache_t is a key, not an address.
typedef struct vmmgraph_kv_cache vmmgraph_kv_cache;

// Never defined: a vmmgraph_lease_t is a key, not an address.
typedef struct vmmgraph_lease vmmgraph_lease;

// Never defined: a vmmgraph_lengths_t is a key, not an address.
typedef struct vmmgraph_lengths vmmgraph_lengths;

// Never defined: a vmmgraph_pause_hooks_t is a key, not an address.
typedef struct vmmgraph_pause_hooks vmmgraph_pause_hooks;

// Never defined: a vmmgraph_peer_map_t is a key, not an address.
typedef struct vmmgraph_peer_map vmmgraph_peer_map;

// Never defined: a vmmgraph_peer_page_t is a key, not an address.
typedef struct vmmgraph_peer_page vmmgraph_peer_page;

// Never defined: a vmmgraph_pending_t is a key, not an address.
typedef struct vmmgraph_pending vmmgraph_pending;

// Never defined: a vmmgraph_pre_commit_t is a key, not an address.
typedef struct vmmgraph_pre_commit vmmgraph_pre_commit;

// Never defined: a vmmgraph_ready_t is a key, not an address.
typedef struct vmmgraph_ready vmmgraph_ready;

// Never defined: a vmmgraph_reclaimer_t is a key, not an address.
typedef struct vmmgraph_reclaimer vmmgraph_reclaimer;

// Never defined: a vmmgraph_region_t is a key, not an address.
typedef struct vmmgraph_region vmmgraph_region;

// Never defined: a vmmgraph_ring_t is a key, not an address.
typedef struct vmmgraph_ring vmmgraph_ring;

// Never defined: a vmmgraph_ring_graph_t is a key, not an address.
typedef struct vmmgraph_ring_graph vmmgraph_ring_graph;

// Never defined: a vmmgraph_slo_control_t is a key, not an address.
typedef struct vmmgraph_slo_control vmmgraph_slo_control;

// Never defined: a vmmgraph_space_t is a key, not an address.
typedef struct vmmgraph_space vmmgraph_space;

// Never defined: a vmmgraph_standing_t is a key, not an address.
typedef struct vmmgraph_standing vmmgraph_standing;

// Never defined: a vmmgraph_vacating_t is a key, not an address.
typedef struct vmmgraph_vacating vmmgraph_vacating;

// The result of a call: VMMGRAPH_OK or one of the VMMGRAPH_ERROR numbers. Numbers are never reused; treat an unknown one as a
// failure.
typedef int32_t vmmgraph_status_t;

// The numbers behind a failure. What does not apply is 0, the device -1.
typedef struct vmmgraph_error_info_t {
  // Set to sizeof(vmmgraph_error_info_t) before the call.
  size_t struct_size;
  // The status the call returned.
  vmmgraph_status_t status;
  // The driver's own result.
  int32_t driver_result;
  // The device's number.
  int32_t device;
  // 0.
  int32_t reserved;
  // Bytes asked for, or missing where memory was short; or the address or argument that was refused.
  uint64_t requested;
  // Bytes there were: free on the device, or left in the budget, or the limit of a size.
  uint64_t available;
} vmmgraph_error_info_t;

// A device: its driver and its page pool. Calls with it are thread-safe.
typedef struct vmmgraph_device *vmmgraph_device_t;

// A budget in the device's tree, for a tenant or a model: what arenas, regions, elastic memory and rings below it hold counts toward it and toward
// those above it. Calls with it are thread-safe.
typedef struct vmmgraph_account *vmmgraph_account_t;

// How to make an account. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_account_options_t {
  // sizeof(vmmgraph_account_options_t).
  size_t struct_size;
  // The account that it is below, of the same device; null: the device's.
  vmmgraph_account_t above;
  // The most that may count toward it; 0: no limit but those above.
  uint64_t budget_bytes;
  // What it is sure to get, which counts toward those above whether it is used or not. Guaranteed only below one that has a budget.
  uint64_t least_bytes;
} vmmgraph_account_options_t;

// What counts toward an account now.
typedef struct vmmgraph_account_stats_t {
  // Set to sizeof(vmmgraph_account_stats_t) before the call.
  size_t struct_size;
  // Bytes of what is below it, of each at least what that is sure to get, and of what the driver is being asked for.
  uint64_t charged_bytes;
  // Its byte budget; 0: none.
  uint64_t budget_bytes;
  // Bytes that it is sure to get.
  uint64_t least_bytes;
} vmmgraph_account_stats_t;

// Gives back what it can of `bytes` that are missing, and returns how many bytes that was. Must not throw.
typedef uint64_t (*vmmgraph_reclaim_fn)(uint64_t bytes, void *user);

// A function that is asked for memory, until it is destroyed.
typedef struct vmmgraph_reclaimer *vmmgraph_reclaimer_t;

// When to commit ahead of need, and when to give back. It has no clock and no thread. Calls with it are thread-safe.
typedef struct vmmgraph_pre_commit *vmmgraph_pre_commit_t;

// How much of what steps used stays mapped between them. Calls with it are thread-safe.
typedef struct vmmgraph_standing *vmmgraph_standing_t;

// How to make an arena. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_arena_options_t {
  // sizeof(vmmgraph_arena_options_t).
  size_t struct_size;
  // Bytes of a small page, a power of two; 0: 2 MiB, or the device's granularity if that is larger.
  uint64_t small_page_bytes;
  // Bytes of a large page, a multiple of the small one; 0: as expected_bytes says.
  uint64_t large_page_bytes;
  // One of VMMGRAPH_RETAIN_*.
  int32_t retain;
  // Any of VMMGRAPH_ARENA_*, added up.
  int32_t flags;
  // The most bytes of physical memory the arena may hold; 0: no limit but the device's. See vmmgraph_arena_set_budget.
  uint64_t budget_bytes;
  // Bytes of addresses that the current space (vmmgraph_arena_allocate) has from its beginning on; 0: addresses are reserved as they
  // are needed. Rounded up to what the device reserves in.
  uint64_t reserve_bytes;
  // About how many bytes the hungriest graph has live at once, which says how large the large pages are: the largest power of two
  // that is at most a forty-eighth of it, but no less than a small page and no more than 16 MiB; 32 MiB from 8 GiB on. 0: not known,
  // 16 MiB or the small page's bytes, whichever is larger.
  uint64_t expected_bytes;
  // Other devices of the platform that may read and write the arena's pages, added up: 1 << n for device n, below 64. Every map
  // costs more for each. The arena's own counts for nothing; one without peer access is VMMGRAPH_ERROR_INVALID_ARGUMENT.
  uint64_t peers;
  // What vmmgraph_device_pause and vmmgraph_device_resume find the arena by, zero-terminated; null: only when they are asked for
  // everything.
  const char *tag;
  // Bytes that it is sure to get, out of the device's budget: so much of what it has is never lent either.
  uint64_t least_bytes;
  // As peers, for the pages of remote and exclusive blocks only: all that other devices read of a collective. What else the arena maps costs no more
  // then.
  uint64_t remote_peers;
  // The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
  vmmgraph_account_t account;
} vmmgraph_arena_options_t;

// An arena: physical pages shared by graphs that never run at the same time. Calls with it are thread-safe.
typedef struct vmmgraph_arena *vmmgraph_arena_t;

// What an arena holds.
typedef struct vmmgraph_arena_stats_t {
  // Set to sizeof(vmmgraph_arena_stats_t) before the call.
  size_t struct_size;
  // Bytes of physical memory: shared, retained, kept and exclusive pages.
  uint64_t physical_bytes;
  // Bytes of shared pages.
  uint64_t shared_bytes;
  // Bytes of the device's free pages, which no space maps and whoever asks next gets; trim gives them back.
  uint64_t free_bytes;
  // Bytes of pages that belong to single spaces.
  uint64_t retained_bytes;
  // Bytes of addresses reserved.
  uint64_t reserved_bytes;
  // Bytes of addresses with a page behind them; a page that shows n times counts n times.
  uint64_t mapped_bytes;
  // Bytes of live blocks.
  uint64_t live_bytes;
  // The most bytes that any one space has needed: live at once, or handed out in a current space.
  uint64_t high_water_bytes;
  // Where the next block of the current space (vmmgraph_arena_allocate) goes, in bytes from its beginning.
  uint64_t current_offset_bytes;
  // Live blocks.
  uint64_t blocks;
  // Spaces.
  uint64_t spaces;
  // Shared pages.
  uint64_t shared_pages;
  // Bytes of pages for kept blocks.
  uint64_t kept_bytes;
  // 1 if an internal error closed the arena, which can only be destroyed then; else 0.
  uint64_t closed;
  // Bytes that count toward the budget: physical_bytes, and what the driver is being asked for.
  uint64_t charged_bytes;
  // The byte budget; 0: none.
  uint64_t budget_bytes;
  // Replays that were launched.
  uint64_t replays;
  // 1 if it is paused, else 0.
  uint64_t paused;
  // Bytes of exclusive blocks (vmmgraph_arena_allocate_exclusive), which are no blocks of a space.
  uint64_t exclusive_bytes;
  // Of the shared bytes, those that are on lease (vmmgraph_arena_lend).
  uint64_t lent_bytes;
} vmmgraph_arena_stats_t;

// What must be over before memory steps aside. Zero everything, then set struct_size and what there is.
typedef struct vmmgraph_fence_t {
  // sizeof(vmmgraph_fence_t).
  size_t struct_size;
  // Streams: everything given to them so far.
  void *const *streams;
  // How many.
  size_t stream_count;
  // Events (CUevent or cudaEvent_t) that were recorded and stay until the call returns.
  void *const *events;
  // How many.
  size_t event_count;
} vmmgraph_fence_t;

// What a pause did.
typedef struct vmmgraph_pause_report_t {
  // Set to sizeof(vmmgraph_pause_report_t) before the call.
  size_t struct_size;
  // Regions and arenas paused by this call; those that were before are not counted.
  uint64_t regions;
  // Pages that went.
  uint64_t pages;
  // Their bytes.
  uint64_t bytes;
  // Bytes copied to the host.
  uint64_t copied_bytes;
  // Bytes that were not copied, because the host has them from an earlier pause.
  uint64_t clean_bytes;
  // Bytes that stay by their policy.
  uint64_t kept_bytes;
  // Bytes that stay because something failed.
  uint64_t left_bytes;
  // Pages that were said to be unwritten and were not (VMMGRAPH_REGION_VERIFY_CLEAN).
  uint64_t stale_pages;
  // Calls to the driver.
  uint64_t calls;
  // Failures; the call returns the status of the first.
  uint64_t failures;
  // All of it, in microseconds.
  uint64_t micros;
  // From the first copy to the end of the last, in microseconds.
  uint64_t copy_micros;
  // Copied bytes in GiB a second of that time; 0: nothing was copied.
  double copy_gib_per_second;
  // One of VMMGRAPH_COPY_*.
  int32_t path;
  // 0.
  int32_t reserved;
} vmmgraph_pause_report_t;

// What a resume did.
typedef struct vmmgraph_resume_report_t {
  // Set to sizeof(vmmgraph_resume_report_t) before the call.
  size_t struct_size;
  // Regions and arenas that came back by this call.
  uint64_t regions;
  // Pages that came.
  uint64_t pages;
  // Their bytes.
  uint64_t bytes;
  // Bytes copied from the host.
  uint64_t copied_bytes;
  // Bytes set to zero.
  uint64_t zeroed_bytes;
  // Calls to the driver.
  uint64_t calls;
  // All of it, in microseconds.
  uint64_t micros;
  // Of these, until the memory was had, in microseconds.
  uint64_t waited_micros;
  // From the first copy to the end of the last, in microseconds; 0: nobody waited for that.
  uint64_t copy_micros;
  // Copied bytes in GiB a second of that time.
  double copy_gib_per_second;
  // One of VMMGRAPH_COPY_*.
  int32_t path;
  // 0.
  int32_t reserved;
} vmmgraph_resume_report_t;

// Which blocks of a cache are used, and which to use next. It holds no memory. Calls with it are thread-safe.
typedef struct vmmgraph_block_pool *vmmgraph_block_pool_t;

// Blocks from one number to below another. It never grows.
typedef struct vmmgraph_block_range_t {
  // The first.
  uint64_t first;
  // Behind the last.
  uint64_t end;
} vmmgraph_block_range_t;

// Whether the engine could give a block in use up: 0 or not. Must not throw. No lock of the library's is held.
typedef int32_t (*vmmgraph_evictable_fn)(uint64_t block, void *user);

// A page that would come free, and the blocks in use on it. It never grows.
typedef struct vmmgraph_candidate_t {
  // Its number.
  uint64_t page;
  // The blocks in use on it.
  const uint64_t *blocks;
  // How many.
  size_t block_count;
} vmmgraph_candidate_t;

// What an engine is asked to vacate.
typedef struct vmmgraph_ask_t {
  // sizeof(vmmgraph_ask_t) of the library.
  size_t struct_size;
  // Pages, those that cost it least first, as many as are needed.
  const struct vmmgraph_candidate_t *pages;
  // How many.
  size_t page_count;
  // Bytes that are wanted.
  uint64_t bytes;
  // Bytes that there would be, those of pages that are empty already included.
  uint64_t there;
  // Until when, in the caller's own units.
  uint64_t by;
} vmmgraph_ask_t;

// Asks the engine to vacate pages: it frees what it can of their blocks by vmmgraph_block_pool_free, there or soon. `ask` is valid during
// the call. Must not throw. No lock of the library's is held.
typedef void (*vmmgraph_evict_fn)(const struct vmmgraph_ask_t *ask, void *user);

// What a block pool has.
typedef struct vmmgraph_block_pool_stats_t {
  // Set to sizeof(vmmgraph_block_pool_stats_t) before the call.
  size_t struct_size;
  // Blocks there are, backed or not.
  uint64_t blocks;
  // Blocks below this are handed out.
  uint64_t limit_blocks;
  // Blocks in use.
  uint64_t in_use;
  // Blocks that could be handed out now: backed, unused, below the limit and not reserved.
  uint64_t available;
  // Blocks set aside.
  uint64_t reserved;
  // Bytes of backed pages on which nothing is used.
  uint64_t empty_bytes;
} vmmgraph_block_pool_stats_t;

// How to open a device. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_device_options_t {
  // sizeof(vmmgraph_device_options_t).
  size_t struct_size;
  // VMMGRAPH_DRIVER_AUTO, _CUDA, _HIP, _ASCEND, _MLU or _HOST.
  int32_t driver;
  // The device's number with that driver, from 0.
  int32_t device;
  // Bytes of physical memory the device's page pool may hold; 0: no limit. Set at open and by vmmgraph_device_set_budget.
  uint64_t budget_bytes;
  // Host driver: mapping granularity in bytes, a power of two; 0: 2 MiB.
  uint64_t host_granularity_bytes;
  // Host driver: bytes of the device; 0: this machine's memory.
  uint64_t host_memory_bytes;
  // VMMGRAPH_SHARING_NONE, _FD or _FABRIC: what other processes can be given the device's pages by. Where it cannot be, opening fails; so it does if
  // the device is open without it. What a device without fabric grants for _FABRIC is _FD, and for _NONE too, where it can and NCCL_GRAPH_REGISTER=0 is
  // in the environment, which promises that NCCL takes no hold of captured buffers: see vmmgraph_device_info.
  int32_t sharing;
  // 1: network cards may read and write its pages (gpuDirectRDMACapable of CUDA, which makes every map dearer). Where that cannot be, opening fails;
  // so it does if the device is open without it.
  int32_t rdma;
  // Other devices of the platform that may read and write all its pages, added up: 1 << n for device n, below 64; at once if it is open. Every map
  // costs more for each. One without peer access is VMMGRAPH_ERROR_INVALID_ARGUMENT.
  uint64_t peers;
} vmmgraph_device_options_t;

// What does not change about a device.
typedef struct vmmgraph_device_info_t {
  // Set to sizeof(vmmgraph_device_info_t) before the call.
  size_t struct_size;
  // VMMGRAPH_DRIVER_CUDA, _HIP, _ASCEND, _MLU or _HOST.
  int32_t driver;
  // The device's number.
  int32_t device;
  // What mapped lengths and addresses are multiples of, in bytes.
  uint64_t granularity_bytes;
  // Bytes of the device.
  uint64_t total_bytes;
  // The device's name, zero-terminated.
  char name[128];
  // What other processes can be given its pages by: VMMGRAPH_SHARING_NONE, _FD or _FABRIC.
  int32_t sharing;
  // Whether network cards may read and write its pages.
  int32_t rdma;
  // Other devices that may read and write all its pages, added up: 1 << n for device n.
  uint64_t peers;
} vmmgraph_device_info_t;

// Exact counts of a device's page pool since the device was opened.
typedef struct vmmgraph_device_stats_t {
  // Set to sizeof(vmmgraph_device_stats_t) before the call.
  size_t struct_size;
  // Bytes held from the driver now.
  uint64_t physical_bytes;
  // The most bytes ever held at once.
  uint64_t peak_physical_bytes;
  // Bytes of pages that belong to single spaces (retained blocks).
  uint64_t retained_bytes;
  // Bytes of pages that are mapped nowhere.
  uint64_t free_bytes;
  // The byte budget; 0: none.
  uint64_t budget_bytes;
  // Pages held now.
  uint64_t pages;
  // Pages created so far.
  uint64_t pages_created;
  // Pages given back so far.
  uint64_t pages_released;
  // Mappings that exist now.
  uint64_t mappings;
  // Mappings made so far.
  uint64_t maps;
  // Mappings taken away so far.
  uint64_t unmaps;
  // Bytes of addresses reserved now.
  uint64_t reserved_bytes;
  // Reservations that exist now.
  uint64_t reservations;
  // Things that wait until the device is done with them, and things the driver refused to take back: trim tries both again.
  uint64_t pending;
  // How often a free page was had without a call to the driver.
  uint64_t pages_reused;
  // Bytes of pages that other processes have too: they stay until that is over.
  uint64_t exported_bytes;
} vmmgraph_device_stats_t;

// A shape: of a step, or of the graph that runs it (a bucket). Never grows, so it has no struct_size.
typedef struct vmmgraph_key_t {
  // What but size makes graphs differ; compared for equality.
  uint32_t variant;
  // Sizes that padding may raise: tokens, batch, KV-cache pages, one of the caller's own. 0 where an axis plays no part.
  uint32_t extents[4];
} vmmgraph_key_t;

// How a dispatcher decides. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_dispatcher_options_t {
  // sizeof(vmmgraph_dispatcher_options_t).
  size_t struct_size;
  // Buckets of full graphs, in any order.
  const struct vmmgraph_key_t *full;
  // How many.
  size_t full_count;
  // Buckets of piecewise graphs, in any order.
  const struct vmmgraph_key_t *piecewise;
  // How many.
  size_t piecewise_count;
  // What one more along each axis costs; all 0: a token costs 1 and nothing else counts.
  uint16_t weights[4];
  // Bits of a step's variant that do not count for piecewise graphs.
  uint32_t piecewise_ignores;
  // Steps of more tokens run eagerly; 0: no limit.
  uint32_t most_tokens;
  // Most graphs that are there or being captured at once; 0: no limit.
  uint32_t most_graphs;
  // 1: a graph that is not there is not captured by the step that needs it.
  int32_t ahead_only;
  // The modes that steps of each VMMGRAPH_PHASE try, first and second.
  int32_t modes[3][2];
  // A graph that is not there may be stood in for by one that weighs at most so many times as much; 0: twice, 1: by none heavier.
  uint32_t stand_in;
  // 0.
  uint32_t reserved;
} vmmgraph_dispatcher_options_t;

// A dispatcher: decides which graph runs a step, and counts why. It holds no graph. Calls with it are thread-safe.
typedef struct vmmgraph_dispatcher *vmmgraph_dispatcher_t;

// What to do with a step, and why.
typedef struct vmmgraph_decision_t {
  // Set to sizeof(vmmgraph_decision_t) before the call.
  size_t struct_size;
  // VMMGRAPH_MODE_EAGER, _PIECEWISE or _FULL.
  int32_t mode;
  // A VMMGRAPH_REASON.
  int32_t reason;
  // 1: capture the graph, and report VMMGRAPH_GRAPH_CAPTURED, _FAILED or _ABANDONED; 0: replay it, or run eagerly.
  int32_t capture;
  // The graph's number, from 0; UINT32_MAX for an eager step.
  uint32_t slot;
  // The shape to pad to; zeros for an eager step.
  struct vmmgraph_key_t bucket;
  // 0.
  uint32_t reserved;
} vmmgraph_decision_t;

// What became of a dispatcher's graphs and steps so far.
typedef struct vmmgraph_dispatcher_stats_t {
  // Set to sizeof(vmmgraph_dispatcher_stats_t) before the call.
  size_t struct_size;
  // Graphs that are there or being captured.
  uint64_t graphs;
  // Captures that succeeded.
  uint64_t captures;
  // Captures that failed.
  uint64_t failures;
  // Graphs that were dropped.
  uint64_t evictions;
  // Weight of the steps that graphs ran, and what padding added to it.
  uint64_t requested;
  // See `requested`.
  uint64_t padding;
  // Steps that ran as others decided (VMMGRAPH_GRAPH_IMPOSED), beside what was decided, and counted, for them here.
  uint64_t imposed;
  // Of those, the eager ones.
  uint64_t imposed_eager;
} vmmgraph_dispatcher_stats_t;

// How to make elastic memory. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_elastic_options_t {
  // sizeof(vmmgraph_elastic_options_t).
  size_t struct_size;
  // Its name in messages, zero-terminated; null: none.
  const char *name;
  // Bytes of every page, a multiple of the device's granularity; 0: about a sixty-fourth of the longest range of addresses, 16 MiB
  // at most. Calls cost per page and not per byte, and memory comes and goes by the page.
  uint64_t page_bytes;
  // The most bytes of physical memory it may hold; 0: no limit but the device's.
  uint64_t budget_bytes;
  // Bytes that it is sure to get, out of the device's budget.
  uint64_t least_bytes;
  // The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
  vmmgraph_account_t account;
} vmmgraph_elastic_options_t;

// Addresses for the most that something may ever be, and pages for what is used of it. Calls with it are thread-safe.
typedef struct vmmgraph_elastic_buffer *vmmgraph_elastic_buffer_t;

// What a commit did. Pages that were there already are not counted.
typedef struct vmmgraph_committed_t {
  // Set to sizeof(vmmgraph_committed_t) before the call.
  size_t struct_size;
  // Bytes that were mapped.
  uint64_t bytes;
  // Pages that were mapped.
  uint64_t pages;
  // Of these, created by the driver. The others were free ones of the device.
  uint64_t created;
  // Pages that were decommitted before and had not gone yet: they stay, without a call, and earlier work may still use them.
  uint64_t revived;
} vmmgraph_committed_t;

// A commit under way on a thread of the library. Calls with it are thread-safe.
typedef struct vmmgraph_pending *vmmgraph_pending_t;

// A stretch of device addresses. It never grows.
typedef struct vmmgraph_range_t {
  // Where it begins.
  uint64_t address;
  // Its bytes.
  uint64_t bytes;
} vmmgraph_range_t;

// What elastic memory holds, and what it did since it was made.
typedef struct vmmgraph_elastic_stats_t {
  // Set to sizeof(vmmgraph_elastic_stats_t) before the call.
  size_t struct_size;
  // Its number, unique in the process.
  uint64_t id;
  // Bytes of a page.
  uint64_t page_bytes;
  // Bytes of addresses.
  uint64_t reserved_bytes;
  // Bytes that are there to be used.
  uint64_t committed_bytes;
  // The most there ever were.
  uint64_t peak_committed_bytes;
  // Bytes that commits under way are mapping.
  uint64_t coming_bytes;
  // Bytes that were decommitted and are still mapped: their fence is not over, or nobody has looked since.
  uint64_t leaving_bytes;
  // Commits that succeeded, also those with nothing to do.
  uint64_t commits;
  // Attempts of commits that failed and were undone.
  uint64_t refused;
  // Decommits of anything that was there.
  uint64_t decommits;
  // Pages mapped.
  uint64_t pages_mapped;
  // Of these, created by the driver.
  uint64_t pages_created;
  // Pages that were committed again before they went.
  uint64_t pages_revived;
  // Pages unmapped.
  uint64_t pages_unmapped;
  // Bytes that count toward its budget.
  uint64_t charged_bytes;
  // Its byte budget; 0: none.
  uint64_t budget_bytes;
} vmmgraph_elastic_stats_t;

// Elastic memory that has come or goes.
typedef struct vmmgraph_shown_t {
  // sizeof(vmmgraph_shown_t) of the library.
  size_t struct_size;
  // The name of the buffer or cache, zero-terminated.
  const char *name;
  // Its number, as in its statistics.
  uint64_t buffer;
  // The addresses, in order.
  const struct vmmgraph_range_t *ranges;
  // How many.
  size_t range_count;
} vmmgraph_shown_t;

// Told that elastic memory has come or goes; `shown` is valid during the call. Must not throw. No lock of the library's is held; what
// would wait there for pages that another thread moves is VMMGRAPH_ERROR_WRONG_STATE.
typedef void (*vmmgraph_shown_fn)(const struct vmmgraph_shown_t *shown, void *user);

// Functions that are told when elastic memory comes and goes, until it is destroyed.
typedef struct vmmgraph_elastic_observer *vmmgraph_elastic_observer_t;

// A part of a page, and where it shows.
typedef struct vmmgraph_page_extent_t {
  // The page: a number that no other page of the device has or had.
  uint64_t page;
  // Where in the page the part begins, in bytes.
  uint64_t offset;
  // Its bytes.
  uint64_t bytes;
  // Where it shows.
  void *address;
  // Bytes of the page, which whoever imports it has to know.
  uint64_t page_bytes;
} vmmgraph_page_extent_t;

// One number of pages for the KV memory and the activations of all steps under way. Calls with it are thread-safe.
typedef struct vmmgraph_grants *vmmgraph_grants_t;

// What was granted.
typedef struct vmmgraph_grants_stats_t {
  // Set to sizeof(vmmgraph_grants_stats_t) before the call.
  size_t struct_size;
  // Pages in all.
  uint64_t pages;
  // Pages that nobody was granted.
  uint64_t free;
  // Pages granted for KV memory.
  uint64_t kv;
  // Pages granted for activations.
  uint64_t activations;
  // Steps that wait.
  uint64_t waiting;
} vmmgraph_grants_stats_t;

// A sequence that grows by a token a step. Never grows itself, so it has no struct_size.
typedef struct vmmgraph_growing_t {
  // Tokens that it holds memory for.
  uint64_t tokens;
  // Tokens that are still to come, known or predicted: then it ends and holds none.
  uint64_t left;
} vmmgraph_growing_t;

// What waits for its turn. Never grows, so it has no struct_size.
typedef struct vmmgraph_due_t {
  // When it is to be over, in any unit.
  uint64_t by;
  // How long it takes.
  uint64_t takes;
  // When it is first, in time or not: nothing waits for ever.
  uint64_t patience;
} vmmgraph_due_t;

// How long sequences become, by those that ended. Calls with it are thread-safe.
typedef struct vmmgraph_lengths *vmmgraph_lengths_t;

// What the host pool of a device holds.
typedef struct vmmgraph_host_stats_t {
  // Set to sizeof(vmmgraph_host_stats_t) before the call.
  size_t struct_size;
  // Bytes held from the operating system.
  uint64_t held_bytes;
  // Those of them that are registered with the device.
  uint64_t registered_bytes;
  // Bytes that no contents are in.
  uint64_t free_bytes;
  // The most it may hold; 0: no limit.
  uint64_t limit_bytes;
} vmmgraph_host_stats_t;

// Host memory that units are copied from, in one piece at one address. Calls with it are thread-safe.
typedef struct vmmgraph_host_buffer *vmmgraph_host_buffer_t;

// How much host memory the KV of waiting sequences may have, and has. It holds none itself. Calls with it are thread-safe.
typedef struct vmmgraph_host_kv *vmmgraph_host_kv_t;

// What KV on the host takes.
typedef struct vmmgraph_host_kv_stats_t {
  // Set to sizeof(vmmgraph_host_kv_stats_t) before the call.
  size_t struct_size;
  // Bytes that there are.
  uint64_t physical_bytes;
  // Of these, bytes that are used at most.
  uint64_t logical_bytes;
  // Bytes that are used.
  uint64_t held_bytes;
  // By so many sequences.
  uint64_t sequences;
} vmmgraph_host_kv_stats_t;

// A size that follows who is late. Calls with it are thread-safe.
typedef struct vmmgraph_slo_control *vmmgraph_slo_control_t;

// How long a dimension is. Never grows, so it has no struct_size.
typedef struct vmmgraph_extent_t {
  // VMMGRAPH_EXTENT_FIXED, _ALONG or _UP_TO.
  int32_t kind;
  // Which of a key's extents, from 0; _ALONG only.
  int32_t axis;
  // The length or the factor.
  uint32_t times;
  // The summand; _ALONG only.
  uint32_t plus;
} vmmgraph_extent_t;

// An input or output, declared once.
typedef struct vmmgraph_input_t {
  // sizeof(vmmgraph_input_t).
  size_t struct_size;
  // Its name, unique, UTF-8, zero-terminated; copied.
  const char *name;
  // A VMMGRAPH_DTYPE.
  int32_t dtype;
  // A VMMGRAPH_ROLE.
  int32_t role;
  // A VMMGRAPH_PAD.
  int32_t pad;
  // Dimensions, 1 to 4.
  int32_t rank;
  // VMMGRAPH_PAD_VALUE: an element's bits, little-endian.
  uint64_t pad_bits;
  // The dimensions, outermost first.
  struct vmmgraph_extent_t shape[4];
} vmmgraph_input_t;

// An input plan: where a graph's inputs and outputs lie in one arena, packed anew for each bucket. It holds no memory. Calls with it
// are thread-safe.
typedef struct vmmgraph_input_plan *vmmgraph_input_plan_t;

// What an input plan needs.
typedef struct vmmgraph_input_plan_info_t {
  // Set to sizeof(vmmgraph_input_plan_info_t) before the call.
  size_t struct_size;
  // Bytes of the device arena. It must be aligned as the inputs are.
  uint64_t arena_bytes;
  // Bytes of host staging memory that every bucket fits.
  uint64_t staging_bytes;
  // Where outputs begin in the arena, for every bucket.
  uint64_t outputs_offset;
} vmmgraph_input_plan_info_t;

// An input's or output's place in one bucket.
typedef struct vmmgraph_input_view_t {
  // Set to sizeof(vmmgraph_input_view_t) before the call.
  size_t struct_size;
  // Bytes from the start of the arena; for a host input, also from the start of staging memory.
  uint64_t offset;
  // Bytes of the whole shape.
  uint64_t bytes;
  // The shape, outermost dimension first; 0 behind the last.
  uint32_t shape[4];
  // Its dimensions.
  int32_t rank;
  // 0.
  int32_t reserved;
} vmmgraph_input_view_t;

// A step's data for one host input.
typedef struct vmmgraph_step_input_t {
  // sizeof(vmmgraph_step_input_t).
  size_t struct_size;
  // Which one, by its number in the declaration.
  size_t input;
  // The elements, contiguous; may be null where there are none.
  const void *data;
  // Their bytes.
  size_t bytes;
  // The shape, outermost dimension first. With a 0 in it, all of the input is padding.
  uint32_t shape[4];
  // Its dimensions.
  int32_t rank;
  // A VMMGRAPH_DTYPE.
  int32_t dtype;
} vmmgraph_step_input_t;

// A space: the addresses of one capture. Calls with it are thread-safe.
typedef struct vmmgraph_space *vmmgraph_space_t;

// Device memory that vmmgraph_space_verify compares.
typedef struct vmmgraph_output_t {
  // Its address.
  const void *address;
  // Its bytes.
  uint64_t bytes;
} vmmgraph_output_t;

// Launches a graph. Must not throw. No lock is held meanwhile: it may call any function, but replaying, marking, trimming and opening
// spaces in the same arena, and a replay in another one that would wait for this one, is VMMGRAPH_ERROR_WRONG_STATE.
typedef void (*vmmgraph_launch_fn)(void *user);

// What vmmgraph_space_verify found.
typedef struct vmmgraph_difference_t {
  // Set to sizeof(vmmgraph_difference_t) before the call.
  size_t struct_size;
  // 1 if an output depends on what was on the shared pages, else 0.
  uint64_t found;
  // The number of the space.
  uint64_t space;
  // Which of the outputs, from 0.
  uint64_t output;
  // The first byte that differs, from the output's beginning.
  uint64_t offset;
} vmmgraph_difference_t;

// How to make a KV cache. Zero everything, then set struct_size, the planes and blocks_most, and what differs from the default.
typedef struct vmmgraph_kv_options_t {
  // sizeof(vmmgraph_kv_options_t).
  size_t struct_size;
  // Bytes of a block in each plane: a layer's keys, a layer's values. Any number of planes, each of any bytes.
  const uint64_t *planes;
  // How many planes.
  size_t plane_count;
  // The most blocks it may ever have: addresses for them are reserved.
  uint64_t blocks_most;
  // Name, pages, budget; null: the default.
  const struct vmmgraph_elastic_options_t *memory;
  // VMMGRAPH_KV_BY_PLANE or _BY_BLOCK.
  int32_t layout;
  // 0.
  int32_t reserved;
} vmmgraph_kv_options_t;

// A KV cache: planes of blocks over elastic memory. Calls with it are thread-safe.
typedef struct vmmgraph_kv_cache *vmmgraph_kv_cache_t;

// Where a plane lies.
typedef struct vmmgraph_kv_plane_t {
  // Set to sizeof(vmmgraph_kv_plane_t) before the call.
  size_t struct_size;
  // Where its block 0 lies, backed or not.
  uint64_t address;
  // Bytes from one block to the next.
  uint64_t stride_bytes;
  // Bytes of a block.
  uint64_t block_bytes;
} vmmgraph_kv_plane_t;

// What a KV cache has. Its memory's statistics are those of vmmgraph_kv_cache_memory.
typedef struct vmmgraph_kv_stats_t {
  // Set to sizeof(vmmgraph_kv_stats_t) before the call.
  size_t struct_size;
  // Planes.
  uint64_t planes;
  // Blocks that it may be used with now: numbers below this, where they are backed.
  uint64_t blocks;
  // The most that was set from outside, or that there are addresses for.
  uint64_t limit_blocks;
  // The revision of that.
  uint64_t revision;
  // 1 if any was set, else 0.
  uint64_t limited;
  // The most there are addresses for.
  uint64_t most_blocks;
  // Blocks that have memory.
  uint64_t backed_blocks;
  // Of these, beyond `blocks`: they go as they are released.
  uint64_t beyond_blocks;
  // Bytes of a block of all planes.
  uint64_t block_bytes;
  // How many blocks behind one another share pages, the first of them a multiple of this: what a block pool is to know.
  uint64_t blocks_a_page;
} vmmgraph_kv_stats_t;

// What the user of pages on lease is asked for: which of these, so many bytes, by then.
typedef struct vmmgraph_vacate_t {
  // sizeof(vmmgraph_vacate_t) of the library.
  size_t struct_size;
  // The lease's number.
  uint64_t lease;
  // Of a buffer: bytes from its base, one range, all of which are to go. Of a cache: the blocks with memory that lie on the lease's pages.
  const struct vmmgraph_block_range_t *ranges;
  // How many.
  size_t range_count;
  // What else has memory there and is not on lease: bytes, or blocks.
  const struct vmmgraph_block_range_t *instead;
  // How many.
  size_t instead_count;
  // Bytes of pages that are wanted.
  uint64_t bytes;
  // How much time is left, in microseconds.
  uint64_t micros;
} vmmgraph_vacate_t;

// A recall under way, while its borrower is asked.
typedef struct vmmgraph_vacating *vmmgraph_vacating_t;

// Stops using what it is asked for, says which blocks it gave up by vmmgraph_vacating_add (of a buffer: all of the range, without saying so)
// and behind what by vmmgraph_vacating_behind, and returns 0; anything else: it needs them all, and the recall fails. `asked` and
// `vacating` are valid during the call, which comes on the thread that recalls, with no lock of the library's held. It may commit other
// parts, and not wait for this lease. Must not throw.
typedef int32_t (*vmmgraph_vacate_fn)(const struct vmmgraph_vacate_t *asked,
                                      vmmgraph_vacating_t vacating,
                                      void *user);

// Pages of an arena that show in elastic memory as well. Calls with it are thread-safe.
typedef struct vmmgraph_lease *vmmgraph_lease_t;

// Receives one line of text: `length` bytes of UTF-8, not zero-terminated, valid during the call. May be called from any thread, by
// several at once; must not throw. No lock of the library's is held: a sink may call every function, vmmgraph_set_log_sink too,
// but what it causes is not logged, and its failures are not kept for vmmgraph_last_error.
//
// The lines of a call come in their order, on its thread, just before it returns; those of calls that a launch function makes, just
// before the replay returns. What is logged outside of every call (by Rust code, or at a thread's end) comes soon after, still in the
// order of its thread, on a thread of the library's. Without a sink, lines go to stderr at once.
typedef void (*vmmgraph_log_fn)(int32_t level, const char *text, size_t length, void *user);

// Called once with `user` when a sink is no longer in use.
typedef void (*vmmgraph_drop_fn)(void *user);

// What a map says that the library does not know. Zero everything, then set struct_size and what is known.
typedef struct vmmgraph_map_options_t {
  // sizeof(vmmgraph_map_options_t).
  size_t struct_size;
  // What the graphs' executables took of the device, which is outside every pool; 0: not known.
  uint64_t executables_bytes;
  // A line for people: which engine, which rank. Copied; may be null.
  const char *title;
} vmmgraph_map_options_t;

// An all-gather of the engine's: writes the `bytes` bytes of each rank to `all`, in the order of the ranks' numbers, of which `mine` are this
// rank's, and returns 0; anything else: it failed. Called with no lock of the library's held: it may call any function. What hangs in it
// is the engine's to end, by a deadline of its process group. Must not throw.
typedef int32_t (*vmmgraph_gather_fn)(const void *mine, size_t bytes, void *all, void *user);

// What came of comparing the replays of several ranks: the same on all of them.
typedef struct vmmgraph_order_report_t {
  // Set to sizeof(vmmgraph_order_report_t) before the call.
  size_t struct_size;
  // Where no difference was found, the number of the last replay up to which all ranks had the same; 0: none yet, or some rank is so far
  // behind that the others do not remember what it launched last.
  uint64_t same;
  // Where no difference was found, the replays of the rank that is furthest.
  uint64_t most;
  // The number of the first replay that is not the same on all ranks, from 1; 0: no difference was found.
  uint64_t replay;
  // 1: it is that replay; 0: that one or one before, which are forgotten.
  int32_t exact;
  // 1: some rank has launched it, and the arena launches nothing more until vmmgraph_arena_restart_order; 0: nobody has.
  int32_t launched;
  // The lowest rank that is otherwise than most.
  uint32_t rank;
  // The lowest rank of most; of groups of one size, the one of the lowest rank is most.
  uint32_t other;
  // 1 if `rank` has that replay and its key is known, else 0.
  int32_t has;
  // 1 if `other` has that replay and its key is known, else 0.
  int32_t other_has;
  // Ranks that are otherwise than most.
  uint64_t ranks;
  // The key of that replay on `rank`; 0 if it is not known.
  uint64_t had;
  // The key of that replay on `other`; 0 if it is not known.
  uint64_t other_had;
} vmmgraph_order_report_t;

// A prompt that waits to begin. Times in one unit, whichever. Never grows, so it has no struct_size.
typedef struct vmmgraph_prompt_t {
  // When it came.
  uint64_t since;
  // When its first token is due.
  uint64_t by;
  // How long that takes.
  uint64_t takes;
  // When it begins, whoever is late by that: nothing waits for ever.
  uint64_t patience;
} vmmgraph_prompt_t;

// A sequence that decodes. Never grows, so it has no struct_size.
typedef struct vmmgraph_decoding_t {
  // When it had its first token.
  uint64_t since;
  // Tokens that it has.
  uint64_t tokens;
  // How long each may take on average.
  uint64_t each;
} vmmgraph_decoding_t;

// A region: memory with a tag that can step aside. Calls with it are thread-safe.
typedef struct vmmgraph_region *vmmgraph_region_t;

// The contents of one tag on their way after vmmgraph_device_resume_async, until it is destroyed. Calls with it are thread-safe.
typedef struct vmmgraph_ready *vmmgraph_ready_t;

// Memory that goes or has come.
typedef struct vmmgraph_moved_t {
  // sizeof(vmmgraph_moved_t) of the library.
  size_t struct_size;
  // The region's tag, zero-terminated.
  const char *tag;
  // The region's number, or the arena's, unique in the process.
  uint64_t region;
  // Counts its mappings.
  uint64_t generation;
  // The addresses, in order.
  const struct vmmgraph_range_t *ranges;
  // How many.
  size_t range_count;
} vmmgraph_moved_t;

// Told that memory goes or has come; `moved` is valid during the call. Must not throw. No lock of the library's is held; pausing or
// resuming the same region there is VMMGRAPH_ERROR_WRONG_STATE.
typedef void (*vmmgraph_moved_fn)(const struct vmmgraph_moved_t *moved, void *user);

// Hooks that are told when memory goes and comes, until they are destroyed.
typedef struct vmmgraph_pause_hooks *vmmgraph_pause_hooks_t;

// A page of another process, imported once. Calls with it are thread-safe.
typedef struct vmmgraph_peer_page *vmmgraph_peer_page_t;

// By what another process imports a page over the fabric (CUmemFabricHandle). Plain bytes: copied and sent as they are.
typedef struct vmmgraph_fabric_handle_t {
  // The driver's.
  uint8_t data[64];
} vmmgraph_fabric_handle_t;

// A part of another process's page, as its owner's vmmgraph_page_extent_t says it.
typedef struct vmmgraph_peer_extent_t {
  // The page.
  vmmgraph_peer_page_t page;
  // Where in the page the part begins, in bytes.
  uint64_t offset;
  // Its bytes.
  uint64_t bytes;
} vmmgraph_peer_extent_t;

// A range of another process at addresses of this one's. Calls with it are thread-safe.
typedef struct vmmgraph_peer_map *vmmgraph_peer_map_t;

// Streams and layers of an Ascend deployment, for the number of ACL graphs that it can hold by vLLM-Ascend's formula. Zero
// everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_acl_graph_streams_t {
  // sizeof(vmmgraph_acl_graph_streams_t).
  size_t struct_size;
  // Streams that captures may take; 0: 1800, which is a device's 2048 less what is kept back.
  uint32_t streams;
  // The model's hidden layers.
  uint32_t layers;
  // Layers of the draft model; 0: there is none.
  uint32_t draft_layers;
  // The data-parallel and tensor-parallel sizes; each above 1 is a communication group.
  uint32_t data_parallel;
  // See `data_parallel`.
  uint32_t tensor_parallel;
  // 1: HCCL_OP_EXPANSION_MODE is AIV.
  int32_t aiv;
  // AIV: further concurrent streams (1 each for expert parallelism, an overlapped shared expert, data parallelism of a
  // mixture-of-experts model).
  uint32_t extra;
  // AIV: 1 keeps one graph's worth of streams back, as later versions do for dense models.
  int32_t reserve_one;
  // Without AIV: how many of the prefill and decode context-parallel sizes are above 1.
  uint32_t context_groups;
  // 0.
  uint32_t reserved;
} vmmgraph_acl_graph_streams_t;

// What graphs may take and cost. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_plan_options_t {
  // sizeof(vmmgraph_plan_options_t).
  size_t struct_size;
  // What one more along each axis costs; all 0: a token costs 1 and nothing else counts.
  uint16_t weights[4];
  // Most graphs; 0: no limit.
  uint32_t most_graphs;
  // 0.
  uint32_t reserved;
  // Most bytes that graphs add by themselves; 0: no limit.
  uint64_t most_graph_bytes;
  // Bytes that one more graph adds (executable graph, retained blocks).
  uint64_t graph_bytes;
  // Most bytes of shared pages; 0: no limit.
  uint64_t most_pool_bytes;
  // Bytes of shared pages that the smallest graph needs.
  uint64_t pool_base_bytes;
  // Bytes of shared pages for each unit of a bucket's weight.
  uint64_t pool_unit_bytes;
  // What an eager step costs in the unit of padding; 0: more than any padding.
  uint64_t eager_step;
  // Streams of an Ascend device; null: no limit by streams.
  const struct vmmgraph_acl_graph_streams_t *streams;
} vmmgraph_plan_options_t;

// A bucket of a plan and what it buys. Never grows, so it has no struct_size.
typedef struct vmmgraph_planned_bucket_t {
  // The bucket.
  struct vmmgraph_key_t key;
  // 0.
  uint32_t reserved;
  // Steps that it runs.
  uint64_t steps;
  // Weight of the padding in those.
  uint64_t padding;
  // What those steps would cost more without it, in the unit of padding.
  uint64_t saves;
} vmmgraph_planned_bucket_t;

// What a set of buckets does with given traffic. Numbers beyond 64 bits are UINT64_MAX, here and below.
typedef struct vmmgraph_waste_t {
  // Set to sizeof(vmmgraph_waste_t) before the call.
  size_t struct_size;
  // Weight of what graphs compute and nobody asked for.
  uint64_t padding;
  // Steps that graphs run.
  uint64_t graph_steps;
  // Steps that no bucket covers.
  uint64_t eager_steps;
} vmmgraph_waste_t;

// What became of a plan.
typedef struct vmmgraph_plan_result_t {
  // Set to sizeof(vmmgraph_plan_result_t) before the call.
  size_t struct_size;
  // Set before the call: where the cost curve goes, and how many numbers there is room for; null and 0: nowhere. The k-th, from 0,
  // is what the best choice of at most k graphs costs, in the unit of padding.
  uint64_t *curve;
  // See `curve`.
  size_t curve_capacity;
  // Numbers of the curve: one more than the graphs that were worth having.
  size_t curve_count;
  // Buckets chosen.
  size_t buckets;
  // The most graphs that the budget allows; UINT32_MAX: any number.
  uint32_t most_graphs;
  // The part of the budget that says so, a VMMGRAPH_LIMITED_BY.
  int32_t limited_by;
  // Weight of the heaviest bucket that the pool has room for; UINT64_MAX: any; 0: none.
  uint64_t heaviest;
  // What the buckets do with the traffic planned for.
  struct vmmgraph_waste_t waste;
} vmmgraph_plan_result_t;

// How to make a region. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_region_options_t {
  // sizeof(vmmgraph_region_options_t).
  size_t struct_size;
  // One of VMMGRAPH_POLICY_*: what becomes of its blocks, but for those that say otherwise.
  int32_t policy;
  // Any of VMMGRAPH_REGION_*, added up.
  int32_t flags;
  // The most bytes of physical memory it may hold; 0: no limit but the device's.
  uint64_t budget_bytes;
  // Bytes of every page, a multiple of the device's granularity, for regions whose pages others shall borrow; 0: as fits, up to
  // 1 GiB.
  uint64_t page_bytes;
  // The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
  vmmgraph_account_t account;
} vmmgraph_region_options_t;

// What a region holds.
typedef struct vmmgraph_region_stats_t {
  // Set to sizeof(vmmgraph_region_stats_t) before the call.
  size_t struct_size;
  // Bytes of pages that are there.
  uint64_t resident_bytes;
  // Bytes of pages that stepped aside.
  uint64_t paused_bytes;
  // Bytes of contents on the host.
  uint64_t host_bytes;
  // Bytes of live blocks.
  uint64_t live_bytes;
  // Bytes of places that no block has.
  uint64_t free_bytes;
  // Bytes of addresses.
  uint64_t reserved_bytes;
  // Live blocks.
  uint64_t blocks;
  // Pages, there or not.
  uint64_t pages;
  // Counts its mappings, from 1 on: what was registered under one generation is not there under another.
  uint64_t generation;
  // 1 if it is paused, else 0.
  uint64_t paused;
  // Bytes that count toward its budget.
  uint64_t charged_bytes;
  // Its byte budget; 0: none.
  uint64_t budget_bytes;
} vmmgraph_region_stats_t;

// A piece of what a step reads, mostly a layer; an array of them is in the order of use. Never grows, so it has no struct_size.
typedef struct vmmgraph_ring_unit_t {
  // Its bytes.
  uint64_t bytes;
  // 1: it is to stay on the device, copied once and again when its source changes. 0: it streams.
  int32_t resident;
  // 0.
  int32_t reserved;
} vmmgraph_ring_unit_t;

// How to make a ring. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_ring_options_t {
  // sizeof(vmmgraph_ring_options_t).
  size_t struct_size;
  // Its name in messages, zero-terminated; null: none.
  const char *name;
  // Slots that the streamed units share; 0: three, of which one is read, one is filled and one is ready.
  size_t slots;
  // What to do with units that the slots do not divide, one of VMMGRAPH_REMAINDER_*.
  int32_t remainder;
  // Any of VMMGRAPH_RING_*, added up.
  int32_t flags;
  // Bytes of every page, a multiple of the device's granularity; 0: the longest unit, if all places together are no longer then; else
  // about an eighth of it, 16 MiB at most. Calls cost per page and not per byte; a place is as long as whole pages.
  uint64_t page_bytes;
  // The most bytes of physical memory it may hold; 0: no limit but the device's.
  uint64_t budget_bytes;
  // GiB a second that the link brings from pinned host memory, measured. What vmmgraph_ring_ceiling_text says is logged then before anything is
  // built, without the budget. 0: it is not known.
  double link_gib_per_second;
  // Seconds that a step takes with everything resident; only beside the link's speed.
  double compute_seconds;
  // Tokens of a step, all sequences together; 0: one.
  uint64_t tokens;
  // The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
  vmmgraph_account_t account;
} vmmgraph_ring_options_t;

// Units that are read in one order, again and again, and are not all on the device. Calls with it are thread-safe; one step is under way at a
// time, as a slot has one user at a time.
typedef struct vmmgraph_ring *vmmgraph_ring_t;

// Where a unit's contents are. Never grows, so it has no struct_size.
typedef struct vmmgraph_ring_place_t {
  // The place: a slot, counted from 0, or behind the slots one of its own. Units of one place show the same memory.
  uint64_t place;
  // Which of the units that stream it is in a step, counted from 0; UINT64_MAX: it is resident.
  uint64_t turn;
} vmmgraph_ring_place_t;

// Which units stream, and through how many slots.
typedef struct vmmgraph_ring_schedule_t {
  // Set to sizeof(vmmgraph_ring_schedule_t) before the call.
  size_t struct_size;
  // Units.
  uint64_t units;
  // Those of them that stream.
  uint64_t streamed;
  // Slots that these share: fewer than asked for where some would never be used twice; 0: nothing streams.
  uint64_t slots;
  // Slots and resident units.
  uint64_t places;
  // Units that were to stream and are resident all the same: the slots do not divide the others, or hold all of them.
  uint64_t kept_resident;
} vmmgraph_ring_schedule_t;

// Bytes of host memory that go to a place in a unit. Never grows, so it has no struct_size.
typedef struct vmmgraph_host_run_t {
  // The host memory, of the ring's device.
  vmmgraph_host_buffer_t source;
  // From its beginning, in bytes.
  uint64_t from;
  // From the unit's beginning, in bytes.
  uint64_t to;
  // How many; 0: nothing is to be copied.
  uint64_t bytes;
} vmmgraph_host_run_t;

// What a ring holds, and what it did since it was made.
typedef struct vmmgraph_ring_stats_t {
  // Set to sizeof(vmmgraph_ring_stats_t) before the call.
  size_t struct_size;
  // Its number, unique in the process.
  uint64_t id;
  // Its units.
  uint64_t units;
  // Those of them that stream.
  uint64_t streamed;
  // The slots they share.
  uint64_t slots;
  // Bytes of a page.
  uint64_t page_bytes;
  // Bytes of addresses.
  uint64_t reserved_bytes;
  // Bytes of the device: slots and resident units.
  uint64_t device_bytes;
  // Units that are acquired now.
  uint64_t acquired;
  // Copies that were given.
  uint64_t copies;
  // Their bytes.
  uint64_t copied_bytes;
  // Units that were acquired.
  uint64_t acquires;
  // Units that were filled ahead of their acquire.
  uint64_t filled_ahead;
  // Units that were filled by their acquire, whose stream then waits for the copy.
  uint64_t filled_late;
  // Fillings ahead that failed. The acquire tries again, and says so if that fails too.
  uint64_t ahead_failed;
  // How often it was aborted.
  uint64_t aborts;
  // Bytes that count toward its budget.
  uint64_t charged_bytes;
  // Its byte budget; 0: none.
  uint64_t budget_bytes;
  // Captured steps that were launched. Their copies are among the copies, their units among nothing else.
  uint64_t launches;
} vmmgraph_ring_stats_t;

// How a step is captured. Zero everything, then set struct_size and what differs from the default; 0 is the default.
typedef struct vmmgraph_ring_capture_options_t {
  // sizeof(vmmgraph_ring_capture_options_t).
  size_t struct_size;
  // Units of the next step that are copied at this one's end, at most as many as there are slots; 0: one, or none with
  // VMMGRAPH_RING_WITHIN_STEP. One keeps the link busy between two steps; the end of a step waits for more.
  size_t tail;
  // The most runs that the source of a unit will have, each a node of the graph, which costs the host a microsecond a launch while it
  // copies, at most 4096; 0: as many as the sources have now, and one at least.
  size_t most_runs;
} vmmgraph_ring_capture_options_t;

// A step of a ring that was captured into a graph. It keeps the ring. One launch of a ring is given at a time. It stays as long as the graph may
// be launched.
typedef struct vmmgraph_ring_graph *vmmgraph_ring_graph_t;

// What a step has to do and what there is for it. Zero everything, then set struct_size and what there is.
typedef struct vmmgraph_ring_demand_t {
  // sizeof(vmmgraph_ring_demand_t).
  size_t struct_size;
  // The units, in the order of use.
  const struct vmmgraph_ring_unit_t *units;
  // How many.
  size_t unit_count;
  // Slots that are wanted; 0: three.
  size_t slots;
  // One of VMMGRAPH_REMAINDER_*.
  int32_t remainder;
  // 0.
  int32_t reserved;
  // Bytes of a page: places are as long as whole ones; 0: no matter.
  uint64_t page_bytes;
  // The most bytes of the device that slots and resident units may take; 0: no limit.
  uint64_t budget_bytes;
  // Tokens of a step, all sequences together; 0: one.
  uint64_t tokens;
  // GiB a second that the link brings from pinned host memory; above 0. Measure it: the library has no number for it.
  double link_gib_per_second;
  // Seconds that a step takes with everything resident; from 0 on.
  double compute_seconds;
} vmmgraph_ring_demand_t;

// What a step comes to with so many units resident. Never grows, so it has no struct_size.
typedef struct vmmgraph_ring_residency_t {
  // Units that are resident.
  uint64_t resident;
  // Bytes of the device: slots and resident units.
  uint64_t device_bytes;
  // Bytes that go over the link in a step.
  uint64_t link_bytes;
  // Seconds of a step at best.
  double step_seconds;
  // Tokens a second at best; infinity for a step that takes no time.
  double tokens_per_second;
  // What bounds it, one of VMMGRAPH_BOUND_*.
  int32_t bound;
  // 0.
  int32_t reserved;
} vmmgraph_ring_residency_t;

// The best that can be had. No arrangement of copies is faster; how near a ring comes is to be measured.
typedef struct vmmgraph_ring_ceiling_t {
  // Set to sizeof(vmmgraph_ring_ceiling_t) before the call.
  size_t struct_size;
  // With the units that stream as asked, or as near to that as slots and budget allow.
  struct vmmgraph_ring_residency_t asked;
  // Seconds of the copies alone, at the link's speed.
  double link_seconds;
  // Seconds of the work alone.
  double compute_seconds;
  // Bytes of the device if everything were resident.
  uint64_t all_resident_bytes;
  // Units.
  uint64_t units;
  // Those of them that stream.
  uint64_t streamed;
  // Slots that these share: fewer than asked for where the budget holds no more or some would never be used twice; 0: nothing streams.
  uint64_t slots;
  // Units that were to stream and are resident all the same.
  uint64_t kept_resident;
  // Rows of more residency that fit the budget.
  size_t residency_count;
} vmmgraph_ring_ceiling_t;

// What a capture used.
typedef struct vmmgraph_seal_report_t {
  // Set to sizeof(vmmgraph_seal_report_t) before the call.
  size_t struct_size;
  // The most bytes that were live at once.
  uint64_t peak_live_bytes;
  // Small shared pages the space shows.
  uint64_t small_pages;
  // Large shared pages the space shows.
  uint64_t large_pages;
  // Mappings made.
  uint64_t maps;
  // Bytes of pages that became the space's own.
  uint64_t retained_bytes;
  // Blocks that are still live.
  uint64_t retained_blocks;
  // Calls made to the driver: to reserve, create, map, set access and unmap.
  uint64_t driver_calls;
  // Nanoseconds spent in them, waiting for other spaces' calls included.
  uint64_t driver_ns;
  // Blocks that were allocated in all.
  uint64_t allocations;
  // A hash of the capture's plan: page sizes, which numbered page is where, every block's place and bytes in order, what is live at its
  // end and the policy for that. In a stitched space the same for the same requests, in any process and whatever was captured before,
  // so that ranks can compare what they captured. Places of kept blocks do not count; those of a bump space depend on the arena's tape
  // too, from its second range of addresses on.
  uint64_t layout_hash;
  // Of the live blocks, remote ones (vmmgraph_space_allocate_remote). With 0, this seal exchanged no page that remote blocks are or were on. Else, by
  // VMMGRAPH_RETAIN_OWN_PAGES, those under them and under what lies beside may be others: peers are to be told after the seal. By other policies
  // they are where they were.
  uint64_t remote_blocks;
  // Their bytes.
  uint64_t remote_bytes;
  // Bytes of device memory that executables of the capture's graphs take while they have some, by what others took: of what
  // VmmGraph for libtorch captures, or torch in a shape whose graphs borrow, from torch 2.8 on. Else 0.
  uint64_t executable_bytes;
} vmmgraph_seal_report_t;

// What a space uses.
typedef struct vmmgraph_space_stats_t {
  // Set to sizeof(vmmgraph_space_stats_t) before the call.
  size_t struct_size;
  // The space's number, unique in the process.
  uint64_t id;
  // VMMGRAPH_SPACE_OPEN, _SEALED, _BROKEN or _RETIRED.
  int32_t phase;
  // What its seal does with live blocks unless it is told otherwise: VMMGRAPH_RETAIN_OWN_PAGES or _SHARED_PAGES.
  int32_t retain;
  // Live blocks.
  uint64_t blocks;
  // Their bytes, rounded up to 512 each.
  uint64_t live_bytes;
  // The most bytes that were live at once.
  uint64_t peak_live_bytes;
  // Bytes of addresses reserved.
  uint64_t reserved_bytes;
  // Bytes of addresses with a page behind them.
  uint64_t mapped_bytes;
  // Bytes of pages that are the space's own.
  uint64_t retained_bytes;
  // Mappings made so far.
  uint64_t maps;
} vmmgraph_space_stats_t;







#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The ABI version of the library that is loaded; compare it with VMMGRAPH_ABI_VERSION of the header.
VMMGRAPH_API uint32_t vmmgraph_abi_version(void);

// The version of the library that is loaded, as "major.minor.patch". Static, zero-terminated.
VMMGRAPH_API const char *vmmgraph_version(void);

// The name of a status, such as "out of memory"; "unknown status" for any other number. Static, zero-terminated.
VMMGRAPH_API
const char *vmmgraph_status_name(vmmgraph_status_t status);

// The numbers behind this thread's last failure; status VMMGRAPH_OK if there was none. Successful calls leave it alone.
//
// Arguments:
// `info` is null or points to a vmmgraph_error_info_t whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_last_error(struct vmmgraph_error_info_t *info);

// This thread's last failure in words, for people. Copies at most `capacity` bytes, always zero-terminated if capacity is not 0,
// and writes the bytes needed (terminator included) to `needed`. Either pointer may be null.
//
// Arguments:
// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_last_error_message(char *buffer,
                                              size_t capacity,
                                              size_t *needed);

// Makes an account, named by `label` in messages; others may have the same. `options` may be null. VMMGRAPH_ERROR_OVER_BUDGET if those above have no room
// for its least. The account keeps the device open.
//
// Arguments:
// `label` is null or a zero-terminated string; `options` is null or points to a struct whose struct_size is set; `account` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_account_create(vmmgraph_device_t device,
                                          const char *label,
                                          const struct vmmgraph_account_options_t *options,
                                          vmmgraph_account_t *account);

// Ends the handle. What is below the account keeps it, with its limits as they are then.
VMMGRAPH_API vmmgraph_status_t vmmgraph_account_destroy(vmmgraph_account_t account);

// Sets its limits, as in its options. Nothing is taken away: with less than is held, every page that is missing is refused until enough
// is given back; a least for which there is no room above holds too, and refuses others.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_account_set_limits(vmmgraph_account_t account,
                                              uint64_t budget_bytes,
                                              uint64_t least_bytes);

// What counts toward it now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_account_stats(vmmgraph_account_t account,
                                         struct vmmgraph_account_stats_t *stats);

// As vmmgraph_device_add_reclaimer, for memory that counts toward this account: asked where its own budget is short, one above it or the device, and
// not where only one below it is.
//
// Arguments:
// As vmmgraph_device_add_reclaimer.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_account_add_reclaimer(vmmgraph_account_t account,
                                                 vmmgraph_reclaim_fn reclaim,
                                                 uint64_t cost,
                                                 void *user,
                                                 vmmgraph_reclaimer_t *reclaimer);

// Makes a policy: with fewer than `low` free blocks, as many are committed as make `high`; what is beyond that is given back once there was
// too much for `residence` steps. Demand that was seen lately is added to both marks for `lead` steps, which is how long a commit may take.
//
// Arguments:
// `policy` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_pre_commit_create(uint64_t low,
                                             uint64_t high,
                                             uint64_t lead,
                                             uint64_t residence,
                                             vmmgraph_pre_commit_t *policy);

// Ends a handle, and with it the policy.
VMMGRAPH_API vmmgraph_status_t vmmgraph_pre_commit_destroy(vmmgraph_pre_commit_t policy);

// What to do before step number `step`, which never falls: `free` blocks are backed and unused, `coming` are being committed, and `granted`
// were handed out since the last call. `action` is one of VMMGRAPH_AHEAD_*, for `blocks` blocks.
//
// Arguments:
// `action` and `blocks` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_pre_commit_step(vmmgraph_pre_commit_t policy,
                                           uint64_t step,
                                           uint64_t free,
                                           uint64_t coming,
                                           uint64_t granted,
                                           int32_t *action,
                                           uint64_t *blocks);

// Makes a policy for memory that comes and goes with steps: what one of the last `residence` steps used stays, and so does less than one in
// `gap` parts too much. VMMGRAPH_ERROR_INVALID_ARGUMENT for a gap of 0.
//
// Arguments:
// `standing` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_standing_create(uint64_t residence,
                                           uint64_t gap,
                                           vmmgraph_standing_t *standing);

// Ends a handle, and with it the policy.
VMMGRAPH_API vmmgraph_status_t vmmgraph_standing_destroy(vmmgraph_standing_t standing);

// Step number `step`, which never falls, uses so much, in any unit.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_standing_used(vmmgraph_standing_t standing,
                                         uint64_t step,
                                         uint64_t amount);

// At a step that holds so much: how much is to stay, and how much may be given back (0: nothing). Either pointer may be null.
//
// Arguments:
// `wanted` and `spare` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_standing_at(vmmgraph_standing_t standing,
                                       uint64_t step,
                                       uint64_t held,
                                       uint64_t *wanted,
                                       uint64_t *spare);

// Makes an arena on a device. `options` may be null. The arena keeps the device open.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set, its tag null or a zero-terminated string; `arena` is null or
// writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_create(vmmgraph_device_t device,
                                        const struct vmmgraph_arena_options_t *options,
                                        vmmgraph_arena_t *arena);

// Ends a handle. The arena's spaces stay until they are destroyed; its pages go when no space needs them.
VMMGRAPH_API vmmgraph_status_t vmmgraph_arena_destroy(vmmgraph_arena_t arena);

// Gives back to the driver what nobody uses, on the whole device: waits for the arena's replays launched so far and for what was
// unmapped behind others, and gives back the device's free pages. `released` (may be null) receives their bytes.
//
// Arguments:
// `released` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_trim(vmmgraph_arena_t arena,
                                      uint64_t *released);

// Limits the bytes of physical memory that the arena's pages take: shared ones, those of its spaces, and those of kept and exclusive blocks; 0: no
// limit but the device's. Nothing is taken away: with less than is held, every page that is missing is refused with
// VMMGRAPH_ERROR_OVER_BUDGET until enough spaces were destroyed. Exact with any number of threads. Pages that no space maps do not count:
// they are the device's. Before an allocation or a seal fails, it waits a moment for what only waits for the device.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_set_budget(vmmgraph_arena_t arena,
                                            uint64_t bytes);

// Orders everything replayed so far for good: the stream of the last replay may be captured or destroyed afterwards.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_mark(vmmgraph_arena_t arena);

// What the arena holds now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_stats(vmmgraph_arena_t arena,
                                       struct vmmgraph_arena_stats_t *stats);

// The arena, its spaces, their blocks and the device's pages as one JSON object. Copies as vmmgraph_last_error_message does.
//
// Arguments:
// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_stats_json(vmmgraph_arena_t arena,
                                            char *buffer,
                                            size_t capacity,
                                            size_t *needed);

// Seals the current space, if there is one, and opens the next: for engines whose captures are strictly serial. Blocks of
// earlier spaces stay valid until the arena is destroyed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_switch_to_new_virtual_space(vmmgraph_arena_t arena);

// Allocates in the current space, opening one if there is none. As vmmgraph_space_allocate.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_allocate(vmmgraph_arena_t arena,
                                          uint64_t bytes,
                                          void *stream,
                                          void **block);

// Frees a block of the current space or of one before it.
VMMGRAPH_API vmmgraph_status_t vmmgraph_arena_deallocate(vmmgraph_arena_t arena, void *block);

// Gives all of the arena's memory back to the driver; addresses stay, and graphs over them stay instantiated. Bytes of retained and kept
// blocks go to the host and come back with vmmgraph_arena_resume; what lies on shared pages is lost, as it is between replays. Waits for
// the fence (null: nothing), the arena's replays and what was given to the streams noted for blocks.
//
// While it is paused, replays and new spaces are VMMGRAPH_ERROR_WRONG_STATE; blocks may be freed, spaces and the arena destroyed. Goes on
// past failures as vmmgraph_device_pause does, and so for arenas with a tag or no tags asked for. While a space is open, or inside a launch
// of the arena, it is VMMGRAPH_ERROR_WRONG_STATE; while a stream it waits for is being captured, VMMGRAPH_ERROR_STREAM_CAPTURING; nothing has
// changed then. `report` may be null.
//
// Arguments:
// `fence` and `report` as in vmmgraph_device_pause.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_pause(vmmgraph_arena_t arena,
                                       const struct vmmgraph_fence_t *fence,
                                       struct vmmgraph_pause_report_t *report);

// Brings the arena's memory back, to the same addresses, and returns when the contents are there. While there is no memory it asks again
// until the deadline, in microseconds from now; 0: as an allocation does. On failure the arena is paused as before, the host has the
// contents, and the call can be repeated. `report` may be null.
//
// Arguments:
// `report` as in vmmgraph_device_pause.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_resume(vmmgraph_arena_t arena,
                                        uint64_t deadline_micros,
                                        struct vmmgraph_resume_report_t *report);

// Replaces large pages of which the arena's graphs use little by small ones, where that saves a thirty-second of their shared pages at least. For
// arenas whose page size nobody chose (expected_bytes): call it once when all captures are made. Addresses stay, and graphs over them stay
// instantiated; what shared pages hold is lost, as it is between replays. Waits as vmmgraph_arena_pause does, and replays and new spaces
// are VMMGRAPH_ERROR_WRONG_STATE meanwhile. The large pages are the device's then: vmmgraph_arena_trim gives them to the driver. `saved`
// (may be null) receives how many bytes fewer the arena holds.
//
// It needs memory for the small pages before the large ones are free: VMMGRAPH_ERROR_OUT_OF_MEMORY or VMMGRAPH_ERROR_OVER_BUDGET without; some
// spaces show small pages then, and the call can be repeated. While the arena is paused or has pages on lease, and as vmmgraph_arena_pause says,
// it is refused, and nothing has changed.
//
// Arguments:
// `fence` as in vmmgraph_device_pause; `saved` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_shrink_to_fit(vmmgraph_arena_t arena,
                                               const struct vmmgraph_fence_t *fence,
                                               uint64_t *saved);

// Makes a pool of so many blocks, none backed, of which `blocks_a_page` behind one another share pages; `block_bytes` is a block's of all
// planes: numbers that vmmgraph_kv_cache_stats has.
//
// Arguments:
// `pool` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_create(uint64_t blocks,
                                             uint64_t blocks_a_page,
                                             uint64_t block_bytes,
                                             vmmgraph_block_pool_t *pool);

// Ends a handle, and with it the pool.
VMMGRAPH_API vmmgraph_status_t vmmgraph_block_pool_destroy(vmmgraph_block_pool_t pool);

// The pages that these blocks cover have memory now.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_back(vmmgraph_block_pool_t pool,
                                           uint64_t first,
                                           uint64_t end);

// The pages that these blocks cover, and on which none is used, have no memory any more. To be said before the memory goes. `lost`, which
// may be null, is how many reserved blocks that costs.
//
// Arguments:
// `lost` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_unback(vmmgraph_block_pool_t pool,
                                             uint64_t first,
                                             uint64_t end,
                                             uint64_t *lost);

// Hands out `count` blocks (`there` is 1), or none (0): a miss is no error. New blocks go to the page with the least room that has
// enough, so that other pages run empty.
//
// Arguments:
// `blocks` points to `count` writable numbers; `there` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_allocate(vmmgraph_block_pool_t pool,
                                               uint64_t count,
                                               uint64_t *blocks,
                                               int32_t *there);

// Sets `count` blocks aside for vmmgraph_block_pool_allocate_reserved; `there` is 1 if there were, else 0.
//
// Arguments:
// `there` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_reserve(vmmgraph_block_pool_t pool,
                                              uint64_t count,
                                              int32_t *there);

// Gives up so many reserved blocks, or as many as there are.
VMMGRAPH_API vmmgraph_status_t vmmgraph_block_pool_unreserve(vmmgraph_block_pool_t pool, uint64_t count);

// As vmmgraph_block_pool_allocate, of the reserved blocks.
//
// Arguments:
// As vmmgraph_block_pool_allocate.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_allocate_reserved(vmmgraph_block_pool_t pool,
                                                        uint64_t count,
                                                        uint64_t *blocks,
                                                        int32_t *there);

// Blocks are not used any more. `emptied`, which may be null, is how many pages came empty by that: vmmgraph_block_pool_surplus says which
// memory may be given back. A block that is not in use, or is named twice, is VMMGRAPH_ERROR_INVALID_ARGUMENT, with nothing changed.
//
// Arguments:
// `blocks` points to `count` numbers; `emptied` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_free(vmmgraph_block_pool_t pool,
                                           const uint64_t *blocks,
                                           size_t count,
                                           uint64_t *emptied);

// Only blocks below `blocks` are handed out from now on. Used ones stay used. `lost`, which may be null, is how many reserved ones that
// costs.
//
// Arguments:
// `lost` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_set_limit(vmmgraph_block_pool_t pool,
                                                uint64_t blocks,
                                                uint64_t *lost);

// The blocks from `first` to below `end` that are in use, in order: those beyond a new limit are what vmmgraph_kv_cache_shrink_to is to
// leave. Writes at most `capacity` ranges, and how many there are.
//
// Arguments:
// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `range_count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_used(vmmgraph_block_pool_t pool,
                                           uint64_t first,
                                           uint64_t end,
                                           struct vmmgraph_block_range_t *ranges,
                                           size_t capacity,
                                           size_t *range_count);

// What is to be backed so that `count` blocks are available: ranges in whole pages, the lowest first. `there` is 1, or 0 if the limit
// leaves too few: then there are no ranges. Writes at most `capacity` ranges, and how many there are.
//
// Arguments:
// As vmmgraph_block_pool_used; `there` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_shortfall(vmmgraph_block_pool_t pool,
                                                uint64_t count,
                                                struct vmmgraph_block_range_t *ranges,
                                                size_t capacity,
                                                size_t *range_count,
                                                int32_t *there);

// Backed pages on which nothing is used: those beyond the limit, and the highest others as long as `keep` blocks and the reserved ones
// are free without them. Ranges in whole pages, in order: for vmmgraph_block_pool_unback, then vmmgraph_kv_cache_release. Writes at most
// `capacity` ranges, and how many there are.
//
// Arguments:
// As vmmgraph_block_pool_used.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_surplus(vmmgraph_block_pool_t pool,
                                              uint64_t keep,
                                              struct vmmgraph_block_range_t *ranges,
                                              size_t capacity,
                                              size_t *range_count);

// Asks the engine to vacate pages so that `bytes` bytes can be given back until `by`, in units of its own: pages all of whose used blocks
// it calls `evictable` (null: all are), those beyond the limit first, then those with the fewest used blocks. `evict` is called once, unless
// no page is to be had or needed, and frees what it can. `empty_bytes`, which may be null, is what is empty afterwards. Blocks may come
// and go on other threads meanwhile, so the engine looks at what it still has of those that it is asked for.
//
// Arguments:
// The functions may be called so, with `user`, on this thread; `empty_bytes` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_ask(vmmgraph_block_pool_t pool,
                                          uint64_t bytes,
                                          uint64_t by,
                                          vmmgraph_evictable_fn evictable,
                                          vmmgraph_evict_fn evict,
                                          void *user,
                                          uint64_t *empty_bytes);

// As vmmgraph_block_pool_ask, of the pages only that the blocks in `ranges` lie on: what a recall of a lease wants back. What
// can be given back afterwards says vmmgraph_block_pool_unused.
//
// Arguments:
// As vmmgraph_block_pool_ask; `ranges` points to `range_count` ranges, or that is 0.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_ask_of(vmmgraph_block_pool_t pool,
                                             const struct vmmgraph_block_range_t *ranges,
                                             size_t range_count,
                                             uint64_t bytes,
                                             vmmgraph_evictable_fn evictable,
                                             vmmgraph_evict_fn evict,
                                             void *user);

// The pages on which no block is used, of those that the blocks in `among` lie on: what can be given back now, as ranges of blocks. Writes at
// most `capacity` ranges, and how many there are.
//
// Arguments:
// `among` points to `among_count` ranges, or that is 0; `ranges` to `capacity` writable ranges, or that is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_unused(vmmgraph_block_pool_t pool,
                                             const struct vmmgraph_block_range_t *among,
                                             size_t among_count,
                                             struct vmmgraph_block_range_t *ranges,
                                             size_t capacity,
                                             size_t *count);

// What the pool has now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_block_pool_stats(vmmgraph_block_pool_t pool,
                                            struct vmmgraph_block_pool_stats_t *stats);

// Opens a device. Opening one again gives another handle to the same page pool. `options` may be null.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set; `device` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_open(const struct vmmgraph_device_options_t *options,
                                       vmmgraph_device_t *device);

// Ends a handle. The device itself closes when its arenas and other handles are gone too.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_close(vmmgraph_device_t device);

// What does not change about the device.
//
// Arguments:
// `info` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_info(vmmgraph_device_t device,
                                       struct vmmgraph_device_info_t *info);

// Limits the bytes of physical memory the device's page pool may hold; 0: no limit. Nothing is taken away.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_set_budget(vmmgraph_device_t device, uint64_t bytes);

// The counts of the device's page pool as they are now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_stats(vmmgraph_device_t device,
                                        struct vmmgraph_device_stats_t *stats);

// Before a stream is captured or destroyed, by whomever: arenas whose last replay was there are marked behind it, so that other threads may replay in
// them meanwhile. As vmmgraph_space_mark in each of those; the first error, after all were tried.
//
// Arguments:
// `stream` is a stream of the device.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_mark(vmmgraph_device_t device,
                                       void *stream);

// A capture begins on this device for which no space was opened, by whomever: its graph may read blocks of spaces that are sealed already. What is freed
// from now on is there for it as for the graphs of spaces captured meanwhile. Where the blocks route into libtorch is installed, captures through libtorch say so by themselves, torch's own too.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_note_capture(vmmgraph_device_t device);

// Gives the device's free pages back to the driver, after waiting for what the device still uses of what is gone, and tries again what
// the driver refused to take back earlier. `released` (may be null) receives the bytes of the pages.
//
// Arguments:
// `released` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_trim(vmmgraph_device_t device,
                                       uint64_t *released);

// Makes a dispatcher without any graph.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set and whose arrays have as many keys as it says; `dispatcher` is
// null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_create(const struct vmmgraph_dispatcher_options_t *options,
                                             vmmgraph_dispatcher_t *dispatcher);

// Ends a dispatcher.
VMMGRAPH_API vmmgraph_status_t vmmgraph_dispatcher_destroy(vmmgraph_dispatcher_t dispatcher);

// Decides for one step and counts the decision, one to capture when it is reported. `capturable` is 0 if the caller knows that the step cannot be in a graph, else 1.
//
// Arguments:
// `step` is null or readable; `decision` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatch(vmmgraph_dispatcher_t dispatcher,
                                    const struct vmmgraph_key_t *step,
                                    int32_t phase,
                                    int32_t capturable,
                                    struct vmmgraph_decision_t *decision);

// The index-th graph to capture ahead of traffic, from 0, largest first in each mode: its mode, slot and bucket. Counts nothing.
// VMMGRAPH_ERROR_INVALID_ARGUMENT behind the last.
//
// Arguments:
// `decision` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_slot(vmmgraph_dispatcher_t dispatcher,
                                           size_t index,
                                           struct vmmgraph_decision_t *decision);

// Tells a dispatcher what became of a graph: one of VMMGRAPH_GRAPH. VMMGRAPH_ERROR_WRONG_STATE if that cannot be.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_report(vmmgraph_dispatcher_t dispatcher,
                                             uint32_t slot,
                                             int32_t event);

// The graph to drop first when room is needed: of those that are there, the one whose last use is the longest ago, but never `kept`
// (UINT32_MAX: any). Writes UINT32_MAX if there is none. Report VMMGRAPH_GRAPH_EVICTED once it is gone.
//
// Arguments:
// `slot` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_least_recently_used(vmmgraph_dispatcher_t dispatcher,
                                                          uint32_t kept,
                                                          uint32_t *slot);

// The counts as they are now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_stats(vmmgraph_dispatcher_t dispatcher,
                                            struct vmmgraph_dispatcher_stats_t *stats);

// Steps that ran in that mode for that reason.
//
// Arguments:
// `steps` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_steps(vmmgraph_dispatcher_t dispatcher,
                                            int32_t mode,
                                            int32_t reason,
                                            uint64_t *steps);

// All counters in Prometheus's text exposition format, with `count` labels on every sample: their names, then as many values, UTF-8.
// Copies at most `capacity` bytes, zero-terminated if capacity is not 0, and writes the bytes needed (terminator included) to `needed`;
// either may be null.
//
// Arguments:
// `labels` points to 2 * `count` zero-terminated texts, or `count` is 0; `buffer` is null or points to `capacity` writable bytes;
// `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_dispatcher_prometheus(vmmgraph_dispatcher_t dispatcher,
                                                 const char *const *labels,
                                                 size_t count,
                                                 char *buffer,
                                                 size_t capacity,
                                                 size_t *needed);

// Reserves `bytes` of addresses, without memory yet. `options` may be null. The buffer keeps the device open.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set; `buffer` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_create(vmmgraph_device_t device,
                                                 uint64_t bytes,
                                                 const struct vmmgraph_elastic_options_t *options,
                                                 vmmgraph_elastic_buffer_t *buffer);

// Ends a handle, and with it the buffer. Before that, everything is decommitted behind a fence, or the device is done with it.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_destroy(vmmgraph_elastic_buffer_t buffer);

// The first address, which never changes. What is not committed has no memory: a device that uses it faults.
//
// Arguments:
// `base` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_elastic_buffer_base(vmmgraph_elastic_buffer_t buffer, void **base);

// Makes every byte from `offset` on usable: maps those of its pages, rounded outward, that are not there. All of them or none. Free
// pages of the device are taken first; before there is no memory, others are asked to give some back. Contents of pages that come are
// anything. Pages that a decommit has not let go yet stay: work on other streams than those of its fence is to wait for
// vmmgraph_elastic_buffer_before. Out of memory leaves everything as it was. `done` may be null.
//
// Arguments:
// `done` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_commit(vmmgraph_elastic_buffer_t buffer,
                                                 uint64_t offset,
                                                 uint64_t bytes,
                                                 struct vmmgraph_committed_t *done);

// As vmmgraph_elastic_buffer_commit, on a thread of the library. Nobody is asked to give memory up for it. What becomes of it is said by
// vmmgraph_pending_wait; `pending` is to be destroyed, and may be null: then nobody is told.
//
// Arguments:
// `pending` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_commit_async(vmmgraph_elastic_buffer_t buffer,
                                                       uint64_t offset,
                                                       uint64_t bytes,
                                                       vmmgraph_pending_t *pending);

// Gives back the pages of `bytes` bytes from `offset` on, rounded inward. They are not to be used from now on, and go behind `fence`
// (null: at once); nobody waits for the device. Until they went they count toward the budget. Its events need to be there during the call
// only. `gone`, which may be null, is the bytes of what was there.
//
// Arguments:
// `fence` is null or points to a struct whose struct_size is set, with as many streams and recorded events as it says; `gone` is null
// or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_decommit(vmmgraph_elastic_buffer_t buffer,
                                                   uint64_t offset,
                                                   uint64_t bytes,
                                                   const struct vmmgraph_fence_t *fence,
                                                   uint64_t *gone);

// Unmaps what was decommitted and is no longer in use. Does not wait. `gone`, which may be null, is the bytes.
//
// Arguments:
// `gone` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_settle(vmmgraph_elastic_buffer_t buffer,
                                                 uint64_t *gone);

// Makes later work of a stream wait for what may still use pages that were committed again before they went. Does not block.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_before(vmmgraph_elastic_buffer_t buffer,
                                                 void *stream);

// Limits the bytes of physical memory that the buffer may hold; 0: no limit but the device's. Nothing is taken away.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_set_budget(vmmgraph_elastic_buffer_t buffer,
                                                     uint64_t bytes);

// The parts that are committed, in order, in whole pages. Writes at most `capacity` of them, and how many there are.
//
// Arguments:
// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_committed(vmmgraph_elastic_buffer_t buffer,
                                                    struct vmmgraph_range_t *ranges,
                                                    size_t capacity,
                                                    size_t *count);

// What the buffer holds now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_stats(vmmgraph_elastic_buffer_t buffer,
                                                struct vmmgraph_elastic_stats_t *stats);

// Calls `after_map` when memory of the buffer is there, before the commit returns, and `before_unmap` when it is not used any more and is
// unmapped next. Either may be null. For registrations that hold pages: RDMA's, for one.
//
// Arguments:
// The functions may be called with `user` from any thread until vmmgraph_elastic_observer_destroy and the calls that were under way then
// have returned; `observer` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_elastic_buffer_observe(vmmgraph_elastic_buffer_t buffer,
                                                  vmmgraph_shown_fn after_map,
                                                  vmmgraph_shown_fn before_unmap,
                                                  void *user,
                                                  vmmgraph_elastic_observer_t *observer);

// The functions are called no more, but by calls that are under way.
VMMGRAPH_API vmmgraph_status_t vmmgraph_elastic_observer_destroy(vmmgraph_elastic_observer_t observer);

// Whether a commit is over: 1, else 0.
//
// Arguments:
// `over` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_pending_done(vmmgraph_pending_t pending, int32_t *over);

// Blocks until a commit is over; its status is the commit's. Waits for the driver's calls only, never for work of the device. May be
// called again. `done` may be null.
//
// Arguments:
// `done` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_pending_wait(vmmgraph_pending_t pending,
                                        struct vmmgraph_committed_t *done);

// Ends a handle; the commit goes on.
VMMGRAPH_API vmmgraph_status_t vmmgraph_pending_destroy(vmmgraph_pending_t pending);

// Allocates an exclusive block: one page of its own, mapped at addresses of its own until it is freed or the arena and all its spaces are gone. No graph
// shares it, nothing else lies on it, poison does not fill it, and no seal, lending or eager work moves it; a pause of the arena leaves it where it is,
// with its memory. For what peers write without waiting for this device, and for what keeps its contents from replay to replay: workspaces, signal pads,
// windows that a library registers. It is zero when this returns, for any stream and any peer: waits for one fill. Before a capture, rather than in one:
// on platforms where nobody may wait while something is captured it is VMMGRAPH_ERROR_STREAM_CAPTURING then.
//
// granularity, a power of two and a multiple of the device's, is what its address and its bytes, rounded up, are multiples of; 0: a small page's
// bytes; what cannot be one is VMMGRAPH_ERROR_INVALID_SIZE. It counts toward the arena's budget.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_allocate_exclusive(vmmgraph_arena_t arena,
                                                    uint64_t bytes,
                                                    uint64_t granularity,
                                                    void **block);

// Frees an exclusive block. Its memory goes behind the arena's replays so far; other work that uses it is over by now, and peers have closed it, or it stays
// theirs (vmmgraph_device_page_exported). VMMGRAPH_ERROR_FOREIGN_POINTER for what is none, or none any more.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_free_exclusive(vmmgraph_arena_t arena,
                                                void *block);

// The page behind an exclusive block or a part of it, as vmmgraph_space_export says it of a space's blocks: one extent. It is the same for as long as the block
// lives, and can be exported at any time.
//
// Arguments:
// `extents` points to `capacity` writable items, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_export(vmmgraph_arena_t arena,
                                        void *base,
                                        uint64_t bytes,
                                        struct vmmgraph_page_extent_t *extents,
                                        size_t capacity,
                                        size_t *count);

// Makes grants of so many pages; a step that waits is overtaken by at most `overtakes` others that leave it too little.
//
// Arguments:
// `grants` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_grants_create(uint64_t pages,
                                         uint64_t overtakes,
                                         vmmgraph_grants_t *grants);

// Ends a handle, and with it the grants.
VMMGRAPH_API vmmgraph_status_t vmmgraph_grants_destroy(vmmgraph_grants_t grants);

// So many pages in all from now on. What was granted beyond them stays granted until it is given back.
VMMGRAPH_API vmmgraph_status_t vmmgraph_grants_set_pages(vmmgraph_grants_t grants, uint64_t pages);

// Step `who`, a number of the caller's, asks for pages of KV memory, which it keeps until its sequences end, and of activations, which it
// keeps until it ends itself. It gets both or neither, so that steps never hold what each other wait for. `answer` is one of
// VMMGRAPH_GRANT_*. One that waits may ask for something else than before.
//
// Arguments:
// `answer` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_grants_ask(vmmgraph_grants_t grants,
                                      uint64_t who,
                                      uint64_t kv,
                                      uint64_t activations,
                                      int32_t *answer);

// Takes so many KV pages for a step under way that cannot go on without, past everybody who waits. `there` is 1, or 0 if there are
// fewer: then none are taken.
//
// Arguments:
// `there` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_grants_extend(vmmgraph_grants_t grants,
                                         uint64_t kv,
                                         int32_t *there);

// Step `who` waits no more.
VMMGRAPH_API vmmgraph_status_t vmmgraph_grants_forget(vmmgraph_grants_t grants, uint64_t who);

// Pages came back: the KV memory of sequences that ended, the activations of a step that did; at most what was granted.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_grants_give(vmmgraph_grants_t grants,
                                       uint64_t kv,
                                       uint64_t activations);

// What is granted now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_grants_stats(vmmgraph_grants_t grants,
                                        struct vmmgraph_grants_stats_t *stats);

// The most blocks of `block_tokens` tokens that these sequences will ever hold together if each grows by a token a step until it ends, at
// most one too many for each: one more may begin if, among these, they stay within what there is. So those that run are not preempted
// for those that came later. VMMGRAPH_ERROR_INVALID_ARGUMENT for blocks of no tokens.
//
// Arguments:
// `sequences` points to `count` items, or that is 0; `blocks` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_admission_peak(uint64_t block_tokens,
                                          const struct vmmgraph_growing_t *sequences,
                                          size_t count,
                                          uint64_t *blocks);

// The order in which most of `all` are over in time if they are served one after the other from `now` on, as positions in it, and how many
// of them, the first, those are: what has run out of patience, oldest first; then what will be in time, by when it is due; then
// the rest, by patience. Where not all can be in time, the longest are left for later. `timely` may be null.
//
// Arguments:
// `all` points to `count` items and `order` to as many writable numbers, or that is 0; `timely` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_in_turn(uint64_t now,
                                   const struct vmmgraph_due_t *all,
                                   size_t count,
                                   size_t *order,
                                   size_t *timely);

// Makes a policy that predicts lengths: it remembers the last `window` sequences that ended, says what `per_mille` of 1000 do not exceed,
// and `first` more tokens where none was as long. VMMGRAPH_ERROR_INVALID_ARGUMENT for an empty window, and above 1000.
//
// Arguments:
// `lengths` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_lengths_create(size_t window,
                                          uint64_t per_mille,
                                          uint64_t first,
                                          vmmgraph_lengths_t *lengths);

// Ends a handle, and with it the policy.
VMMGRAPH_API vmmgraph_status_t vmmgraph_lengths_destroy(vmmgraph_lengths_t lengths);

// A sequence ended with so many tokens generated.
VMMGRAPH_API vmmgraph_status_t vmmgraph_lengths_ended(vmmgraph_lengths_t lengths, uint64_t tokens);

// How many tokens one that has generated so many will have in the end, by those that became longer than it is.
//
// Arguments:
// `total` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_lengths_total(vmmgraph_lengths_t lengths,
                                         uint64_t generated,
                                         uint64_t *total);

// Makes sure that the device's host pool holds `bytes` at least, in use or not: mapped, faulted in, and registered where that is
// granted, so that a pause need not do it. VMMGRAPH_ERROR_INVALID_SIZE beyond 2^46 bytes;
// VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY beyond the pool's limit and beyond the memory that the machine, or
// the control group of the process, has available. A call that fails holds no more than before.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_prepare_backup(vmmgraph_device_t device,
                                                 uint64_t bytes);

// Limits the bytes that the device's host pool may hold; 0: no limit. Nothing is taken away.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_set_host_budget(vmmgraph_device_t device, uint64_t bytes);

// Gives back to the operating system what no contents are in. `released` (may be null) receives the bytes.
//
// Arguments:
// `released` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_trim_host(vmmgraph_device_t device, uint64_t *released);

// What the device's host pool holds now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_host_stats(vmmgraph_device_t device,
                                             struct vmmgraph_host_stats_t *stats);

// Takes `bytes` bytes of host memory, at most 1 GiB, from the device's host pool, for the sources of a ring's units. Their contents are
// anything. `pinning` is one of VMMGRAPH_PINNING_*. The buffer keeps the device open.
//
// Arguments:
// `buffer` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_create(vmmgraph_device_t device,
                                              uint64_t bytes,
                                              int32_t pinning,
                                              vmmgraph_host_buffer_t *buffer);

// Ends a handle. The memory stays for as long as a ring has it as a source, and goes back to the host pool behind the copies from it. Blocks
// nobody.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_destroy(vmmgraph_host_buffer_t buffer);

// Where the memory begins in this process, its bytes, and whether it is registered with the device (1, else 0). Any may be null. Who writes
// there waits for the copies from it first (vmmgraph_host_buffer_wait), lets no ring copy meanwhile, and says so afterwards
// (vmmgraph_host_buffer_changed). The address is good while the handle is, or a ring has the buffer as a source.
//
// Arguments:
// `base`, `bytes` and `registered` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_info(vmmgraph_host_buffer_t buffer,
                                            void **base,
                                            uint64_t *bytes,
                                            int32_t *registered);

// Writes `bytes` bytes of `from` to the buffer, from `at` on. Blocks until the copies from it and to it that were given are over. What rings hold of it is out
// of date then: the next use copies it again. VMMGRAPH_ERROR_INVALID_SIZE beyond the end; nothing is written on failure.
//
// Arguments:
// `from` points to `bytes` readable bytes that are not the buffer's own, or that is 0.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_write(vmmgraph_host_buffer_t buffer,
                                             uint64_t at,
                                             const void *from,
                                             size_t bytes);

// Copies `bytes` bytes of the device to the buffer, from `at` on: behind what `stream` was given so far, behind the copies from the buffer and the launches of captured steps
// that read it, and beside whatever comes later, by the engine of the other direction. Does not block. What rings hold of it is out of date then: the next use
// copies it again, behind this. Who writes those bytes of the device again does so on a stream that waits (vmmgraph_host_buffer_before).
// VMMGRAPH_ERROR_INVALID_SIZE beyond the end, VMMGRAPH_ERROR_HOST_NOT_REGISTERED, VMMGRAPH_ERROR_STREAM_CAPTURING, and VMMGRAPH_ERROR_WRONG_STATE while a captured
// step that reads it is being launched.
//
// Arguments:
// `from` is an address of `bytes` mapped bytes of the device, until the copy is over.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_store(vmmgraph_host_buffer_t buffer,
                                             uint64_t at,
                                             const void *from,
                                             uint64_t bytes,
                                             void *stream);

// Makes later work of a stream wait for the stores that the buffer was given, so that what they copy may be written again. Does not block.
// VMMGRAPH_ERROR_STREAM_CAPTURING for a stream under capture.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_before(vmmgraph_host_buffer_t buffer,
                                              void *stream);

// Reads `bytes` bytes of the buffer, from `at` on, to `into`, when the copies to it are over. VMMGRAPH_ERROR_INVALID_SIZE beyond the end.
//
// Arguments:
// `into` points to `bytes` writable bytes that are not the buffer's own, or that is 0.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_read(vmmgraph_host_buffer_t buffer,
                                            uint64_t at,
                                            void *into,
                                            size_t bytes);

// Says that the contents were changed otherwise than by vmmgraph_host_buffer_write: the next use of what rings hold of it copies it again.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_changed(vmmgraph_host_buffer_t buffer);

// Blocks the caller until the copies from it and to it that were given are over. VMMGRAPH_ERROR_STREAM_CAPTURING where a platform allows no wait while
// something is captured.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_buffer_wait(vmmgraph_host_buffer_t buffer);

// Makes a count of so many bytes of host memory for KV, all of them to be used: a prompt whose KV memory has no room on the device yet is
// prefilled all the same, its KV goes to the host, and comes back when there is room.
//
// Arguments:
// `host_kv` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_create(uint64_t physical_bytes,
                                          vmmgraph_host_kv_t *host_kv);

// Ends a handle, and with it the count.
VMMGRAPH_API vmmgraph_status_t vmmgraph_host_kv_destroy(vmmgraph_host_kv_t host_kv);

// It is used for so many bytes at most: the physical ones at most. What is there beyond stays until it is taken.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_set_logical(vmmgraph_host_kv_t host_kv,
                                               uint64_t bytes);

// Room for a sequence's bytes within the logical size. `there` is 1, or 0 if there is not so much, or if it is there already.
//
// Arguments:
// `there` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_put(vmmgraph_host_kv_t host_kv,
                                       uint64_t sequence,
                                       uint64_t bytes,
                                       int32_t *there);

// As vmmgraph_host_kv_put, within the physical size only: for a sequence that would lose its KV memory otherwise.
//
// Arguments:
// As vmmgraph_host_kv_put.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_rescue(vmmgraph_host_kv_t host_kv,
                                          uint64_t sequence,
                                          uint64_t bytes,
                                          int32_t *there);

// A sequence's bytes are on the device again, or nobody's. `bytes`, which may be null, is how many. VMMGRAPH_ERROR_INVALID_ARGUMENT for
// one that is not there.
//
// Arguments:
// `bytes` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_take(vmmgraph_host_kv_t host_kv,
                                        uint64_t sequence,
                                        uint64_t *bytes);

// What is there now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_host_kv_stats(vmmgraph_host_kv_t host_kv,
                                         struct vmmgraph_host_kv_stats_t *stats);

// Makes a size between `least` and `most`, beginning at `value`, for vmmgraph_host_kv_set_logical: as eLLM does with the logical size of its
// buffer. VMMGRAPH_ERROR_INVALID_ARGUMENT for a least of 0, from which nothing grows, and for a value out of these bounds.
//
// Arguments:
// `control` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_slo_control_create(uint64_t least,
                                              uint64_t value,
                                              uint64_t most,
                                              vmmgraph_slo_control_t *control);

// Ends a handle, and with it the control.
VMMGRAPH_API vmmgraph_status_t vmmgraph_slo_control_destroy(vmmgraph_slo_control_t control);

// An iteration is over: whether a first token was late in it (1, else 0), or another one. The size doubles when first tokens were late in
// three of the last five iterations, halves when later tokens were, and stays when both were; after a change only new iterations are looked
// at. `change` is one of VMMGRAPH_SLO_*, `value` the size from now on; either may be null.
//
// Arguments:
// `change` and `value` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_slo_control_step(vmmgraph_slo_control_t control,
                                            int32_t first_late,
                                            int32_t other_late,
                                            int32_t *change,
                                            uint64_t *value);

// Lays inputs and outputs out for every bucket, each at a multiple of `alignment` bytes (a power of two from 256 to 2 MiB; 0: 512).
//
// Arguments:
// `inputs` points to `input_count` structs, all with their struct_size, or that is 0; `buckets` to `bucket_count` keys, or that is 0;
// `plan` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_input_plan_create(const struct vmmgraph_input_t *inputs,
                                             size_t input_count,
                                             const struct vmmgraph_key_t *buckets,
                                             size_t bucket_count,
                                             uint64_t alignment,
                                             vmmgraph_input_plan_t *plan);

// Ends an input plan.
VMMGRAPH_API vmmgraph_status_t vmmgraph_input_plan_destroy(vmmgraph_input_plan_t plan);

// What the plan needs.
//
// Arguments:
// `info` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_input_plan_info(vmmgraph_input_plan_t plan,
                                           struct vmmgraph_input_plan_info_t *info);

// The place of an input or output, by its number in the declaration, in a bucket.
//
// Arguments:
// `bucket` is null or readable; `view` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_input_plan_view(vmmgraph_input_plan_t plan,
                                           const struct vmmgraph_key_t *bucket,
                                           size_t input,
                                           struct vmmgraph_input_view_t *view);

// Writes the host inputs of a step into staging memory, padded to the bucket, and where in staging memory the last of them ends. One
// copy of so many bytes, from the start of staging memory to the start of the arena, covers the step.
//
// Inputs come in the order of their declaration, each once; what staging memory has of one that is not among them stays as it is. All
// are checked before anything is written: on failure staging memory is as it was.
//
// Arguments:
// `bucket` is null or readable; `inputs` points to `input_count` structs, all with their struct_size and with as many bytes of data as
// they say, or that is 0; `staging` points to `staging_bytes` writable bytes that overlap no data; `end` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_input_plan_pack(vmmgraph_input_plan_t plan,
                                           const struct vmmgraph_key_t *bucket,
                                           const struct vmmgraph_step_input_t *inputs,
                                           size_t input_count,
                                           void *staging,
                                           size_t staging_bytes,
                                           uint64_t *end);

// The blocks that are live now as a JSON array, by address: address, bytes, which allocation of the space it was (from 1), and in an
// arena with VMMGRAPH_ARENA_TRACE_BLOCKS its age and the call stack that allocated it. Copies as vmmgraph_last_error_message does.
//
// Arguments:
// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_blocks_json(vmmgraph_space_t space,
                                             char *buffer,
                                             size_t capacity,
                                             size_t *needed);

// Replays twice over shared pages filled with one pattern and then another, and compares the outputs to the bit. `launch(user)` must
// give the same work to `stream` both times, over inputs that it leaves as they were, without random numbers. Waits for the device.
//
// Arguments:
// As vmmgraph_space_replay; `outputs` points to `count` outputs, which are device memory of the caller; `difference` is null or
// points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_verify(vmmgraph_space_t space,
                                        void *stream,
                                        const struct vmmgraph_output_t *outputs,
                                        size_t count,
                                        vmmgraph_launch_fn launch,
                                        void *user,
                                        struct vmmgraph_difference_t *difference);

// Reserves addresses for the most blocks of all planes, without memory yet. The cache keeps the device open.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set, with as many planes as it says, and whose memory is null or points to
// such a struct; `cache` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_create(vmmgraph_device_t device,
                                           const struct vmmgraph_kv_options_t *options,
                                           vmmgraph_kv_cache_t *cache);

// Ends a handle, and with it the cache, once commits under way on the library's thread are over. Before that, everything is released
// behind a fence, or the device is done with it.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_destroy(vmmgraph_kv_cache_t cache);

// Where a plane lies. It never changes, so graphs captured over it stay valid however the cache grows and shrinks; what is not backed has
// no memory, and a device that uses it faults.
//
// Arguments:
// `place` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_plane(vmmgraph_kv_cache_t cache,
                                          size_t plane,
                                          struct vmmgraph_kv_plane_t *place);

// Backs the blocks below `blocks` in all planes, or in none, and lets the cache be used with so many. What is backed stays as it is.
// Fewer than it has: nothing is taken away. Otherwise as vmmgraph_kv_cache_commit.
//
// Arguments:
// `done` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_grow_to(vmmgraph_kv_cache_t cache,
                                            uint64_t blocks,
                                            struct vmmgraph_committed_t *done);

// Backs the blocks from `first` to below `end` in all planes, or in none; if it ends beyond what the cache could be used with, it now can
// be with those. Contents of what comes are anything; blocks that were released and had not gone yet keep theirs, and work on other
// streams than those of their fence is to wait for vmmgraph_kv_cache_before. Before there is no memory, others are asked to give some
// back. Out of memory, or VMMGRAPH_ERROR_OVER_BUDGET beyond the limit, leaves everything as it was. `done` may be null.
//
// Arguments:
// `done` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_commit(vmmgraph_kv_cache_t cache,
                                           uint64_t first,
                                           uint64_t end,
                                           struct vmmgraph_committed_t *done);

// As vmmgraph_kv_cache_commit, on a thread of the library. Nobody is asked to give memory up for it. Its order with other calls is that of
// its beginning there; but what a shrink took away meanwhile it does not bring back. What becomes of it is said by
// vmmgraph_pending_wait; `pending` is to be destroyed, and may be null: then nobody is told.
//
// Arguments:
// `pending` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_commit_async(vmmgraph_kv_cache_t cache,
                                                 uint64_t first,
                                                 uint64_t end,
                                                 vmmgraph_pending_t *pending);

// Lets the cache be used with so many blocks at most, from now on. Blocks beyond that which are in none of the `busy` ranges go behind
// `fence` (null: at once); the busy ones keep their memory until vmmgraph_kv_cache_release. `left`, which may be null, is how many those
// are. Nobody waits for the device. The fence's events need to be there during the call only.
//
// Arguments:
// `busy` points to `busy_count` ranges, or that is 0; `fence` is null or points to a struct whose struct_size is set, with as many
// streams and recorded events as it says; `left` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_shrink_to(vmmgraph_kv_cache_t cache,
                                              uint64_t blocks,
                                              const struct vmmgraph_block_range_t *busy,
                                              size_t busy_count,
                                              const struct vmmgraph_fence_t *fence,
                                              uint64_t *left);

// Blocks are not used any more, wherever they are: their pages go behind `fence` (null: at once) once no other block on them is backed.
// Does not wait; while another thread grows the cache, they go when it is done. Blocks that have no memory are left out.
//
// Arguments:
// `fence` as in vmmgraph_kv_cache_shrink_to.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_release(vmmgraph_kv_cache_t cache,
                                            uint64_t first,
                                            uint64_t end,
                                            const struct vmmgraph_fence_t *fence);

// Sets the most blocks from outside: nothing beyond is granted from now on. Revisions grow; one that is not the latest is ignored. More
// than there are addresses for is as many as there are. `change`, which may be null, is one of VMMGRAPH_LIMIT_APPLIED, _DEFERRED,
// _STALE, _CONFLICT.
//
// Arguments:
// `change` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_set_limit(vmmgraph_kv_cache_t cache,
                                              uint64_t blocks,
                                              uint64_t revision,
                                              int32_t *change);

// Blocks that have memory, in order. Writes at most `capacity` ranges, and how many there are.
//
// Arguments:
// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_backed(vmmgraph_kv_cache_t cache,
                                           struct vmmgraph_block_range_t *ranges,
                                           size_t capacity,
                                           size_t *count);

// Blocks that have memory beyond what the cache may be used with: they are to be released. As vmmgraph_kv_cache_backed.
//
// Arguments:
// As vmmgraph_kv_cache_backed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_beyond(vmmgraph_kv_cache_t cache,
                                           struct vmmgraph_block_range_t *ranges,
                                           size_t capacity,
                                           size_t *count);

// Unmaps what was released and is no longer in use. Does not wait. `gone`, which may be null, is the bytes.
//
// Arguments:
// `gone` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_kv_cache_settle(vmmgraph_kv_cache_t cache, uint64_t *gone);

// Makes later work of a stream wait for what may still use blocks that were backed again before they went. Does not block.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_before(vmmgraph_kv_cache_t cache,
                                           void *stream);

// Limits the bytes of physical memory that the cache may hold; 0: no limit but the device's. Nothing is taken away.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_set_budget(vmmgraph_kv_cache_t cache,
                                               uint64_t bytes);

// What the cache has now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_stats(vmmgraph_kv_cache_t cache,
                                          struct vmmgraph_kv_stats_t *stats);

// What the cache's memory holds now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_memory(vmmgraph_kv_cache_t cache,
                                           struct vmmgraph_elastic_stats_t *stats);

// As vmmgraph_elastic_buffer_observe, of a cache's memory.
//
// Arguments:
// As vmmgraph_elastic_buffer_observe.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_kv_cache_observe(vmmgraph_kv_cache_t cache,
                                            vmmgraph_shown_fn after_map,
                                            vmmgraph_shown_fn before_unmap,
                                            void *user,
                                            vmmgraph_elastic_observer_t *observer);

// Lends large pages of an arena to `bytes` bytes of a buffer from `offset` on, whole pages where nothing is committed: they show there too and
// are usable, with undefined contents, and stay mapped for the graphs. Those that show one are not replayed until a recall
// (VMMGRAPH_ERROR_WRONG_STATE), nor do captures and eager work get them; vmmgraph_arena_set_recall makes them wait. Of the pages that are
// not on lease those go that the fewest graphs show. They count for the arena; what its account, and those above it, are sure to get
// is not lent. First work on them waits for vmmgraph_lease_before. Waits for the end of a replay that another thread is launching. Another
// thread may have them recalled before this returns: whoever keeps account of what he has notes them before, and looks again afterwards. What
// fails changes nothing.
//
// Arguments:
// `vacate` may be called with `user` from any thread that recalls, until the lease is over and the recalls that were under way then have
// returned; `lease` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_lend(vmmgraph_arena_t arena,
                                      vmmgraph_elastic_buffer_t buffer,
                                      uint64_t offset,
                                      uint64_t bytes,
                                      vmmgraph_vacate_fn vacate,
                                      void *user,
                                      vmmgraph_lease_t *lease);

// As vmmgraph_arena_lend, for blocks of a KV cache from `first` to below `end`, of which none has memory: they are backed in all planes, or
// nothing has changed. Wherever a page of theirs is missing, one is lent; VMMGRAPH_ERROR_OVER_BUDGET beyond the cache's limit.
//
// Arguments:
// As vmmgraph_arena_lend.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_lend_blocks(vmmgraph_arena_t arena,
                                             vmmgraph_kv_cache_t cache,
                                             uint64_t first,
                                             uint64_t end,
                                             vmmgraph_vacate_fn vacate,
                                             void *user,
                                             vmmgraph_lease_t *lease);

// What becomes of replays, eager work and captures of the arena that need pages on lease, from now on: with microseconds, they recall those
// leases themselves and wait so long at most; 0, as at first: they are refused. Nothing runs over such pages either way.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_set_recall(vmmgraph_arena_t arena,
                                            uint64_t micros);

// Recalls every lease in the way of a space's replay, or every lease of the arena if `space` is null, within so many microseconds. All are
// tried; the status is the first failure's.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_recall(vmmgraph_arena_t arena,
                                        vmmgraph_space_t space,
                                        uint64_t micros);

// How many bytes could be lent now to somebody who shares none of the arena's accounts, and how many are lent. Either may be null.
//
// Arguments:
// `lendable` and `lent` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_lendable(vmmgraph_arena_t arena,
                                          uint64_t *lendable,
                                          uint64_t *lent);

// The numbers of the leases on pages that a space shows: as long as there are any, it is not replayed. Writes at most `capacity`, and how
// many there are.
//
// Arguments:
// `leases` points to `capacity` writable numbers, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_leases(vmmgraph_space_t space,
                                        uint64_t *leases,
                                        size_t capacity,
                                        size_t *count);

// A lease's number, and its bytes that are still on lease; 0: it is over. Either may be null.
//
// Arguments:
// `number` and `bytes` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_lease_bytes(vmmgraph_lease_t lease,
                                       uint64_t *number,
                                       uint64_t *bytes);

// Makes later work of a stream, the borrower's first on these pages, wait for the graphs that used them before. Does not block.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_lease_before(vmmgraph_lease_t lease,
                                        void *stream);

// Has `bytes` bytes of pages given back, or all of them if 0: asks the borrower, waits for its fence, and unmaps them from its memory; over
// already: nothing. One thread recalls at a time. VMMGRAPH_ERROR_WRONG_STATE if the borrower refused or gave up too little, or if its fence
// is not over within so many microseconds: then the pages are no longer the borrower's, and come back when somebody looks again.
// Until they are back, nothing is committed in their places.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_lease_recall(vmmgraph_lease_t lease,
                                        uint64_t bytes,
                                        uint64_t micros);

// Ends a handle; the lease goes on until the borrower has its pages no more.
VMMGRAPH_API vmmgraph_status_t vmmgraph_lease_destroy(vmmgraph_lease_t lease);

// The borrower gave up the blocks from `first` to below `end`. While it is asked only.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_vacating_add(vmmgraph_vacating_t vacating,
                                        uint64_t first,
                                        uint64_t end);

// What the borrower gave up is in use until this fence is over (null: nothing). While it is asked only; several fences add up, and their
// events need to be there during this call only.
//
// Arguments:
// `fence` is null or points to a struct whose struct_size is set, with as many streams and recorded events as it says.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_vacating_behind(vmmgraph_vacating_t vacating,
                                           const struct vmmgraph_fence_t *fence);

// Sends log lines up to `max_level` to `sink` from now on; null: to nobody, or to stderr if VMMGRAPH_LOG says so. The sink
// before is dropped once nobody is inside it.
//
// Arguments:
// `sink` and `drop` are null or may be called with `user` from any thread.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_set_log_sink(vmmgraph_log_fn sink,
                                        void *user,
                                        vmmgraph_drop_fn drop,
                                        int32_t max_level);

// Which space shows which page of the arena, what blocks covered at each one's peak, what dropping one gives back, and who else has
// memory of the device, as one JSON object ("format": 1; its keys: vmmgraph::map::ArenaMap in the Rust documentation, docs/map.md).
// `options` may be null. Asks every space and walks the device's pages; nothing is stopped for it. Copies as
// vmmgraph_last_error_message does; the arena may have changed between two calls.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set, and its title is null or a zero-terminated string; `buffer` is
// null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_map_json(vmmgraph_arena_t arena,
                                          const struct vmmgraph_map_options_t *options,
                                          char *buffer,
                                          size_t capacity,
                                          size_t *needed);

// Spaces that are opened from now on note every block that comes and goes (`on` is not 0), or do not, for the map's view of one
// capture; also on with VMMGRAPH_TRACE_EVENTS=1 in the environment. Costs host memory for every block, as long as the space is there.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_trace_events(vmmgraph_arena_t arena,
                                              int32_t on);

// A web page of a map, given as the JSON text of vmmgraph_arena_map_json: one file that fetches nothing. Needs no device.
// VMMGRAPH_ERROR_INVALID_ARGUMENT for what is no map, or one of another format. Copies as vmmgraph_last_error_message does.
//
// Arguments:
// `map` is null or a zero-terminated string; `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_map_html(const char *map,
                                    char *buffer,
                                    size_t capacity,
                                    size_t *needed);

// A map as a table of plain text that fits a log: three lines that say the most, and a line for each of the 40 hungriest shapes. As
// vmmgraph_map_html beyond that.
//
// Arguments:
// As [`vmmgraph_map_html`].
VMMGRAPH_API
vmmgraph_status_t vmmgraph_map_report(const char *map,
                                      char *buffer,
                                      size_t capacity,
                                      size_t *needed);

// The captures of a map as a timeline in the trace event format, which Perfetto opens: a slice for each, and counters. As
// vmmgraph_map_html beyond that.
//
// Arguments:
// As [`vmmgraph_map_html`].
VMMGRAPH_API
vmmgraph_status_t vmmgraph_map_perfetto(const char *map,
                                        char *buffer,
                                        size_t capacity,
                                        size_t *needed);

// How many replays of an arena were launched, eager scopes among them: the same on ranks that replay alike. Inside a launch it is the number of
// that replay.
//
// Arguments:
// `replays` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_replay_seq(vmmgraph_arena_t arena,
                                            uint64_t *replays);

// Lets the next replay of an arena with VMMGRAPH_ARENA_SERIAL say anew on which stream and thread all later ones have to be. Waits for the
// end of a replay or scope that another thread is at; inside one of this thread it is VMMGRAPH_ERROR_WRONG_STATE. The replays of the new
// place wait for those before, as in any arena. Without effect in an arena that is not serial.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_lift_serial(vmmgraph_arena_t arena);

// Compares with the other ranks what was launched so far in an arena with VMMGRAPH_ARENA_CHECK_ORDER: each replay's key
// (vmmgraph_space_set_order_key; eager scopes have one of their own), in order. Any time, on any thread; all ranks call it, each with its
// own number below `ranks` (4096 at most). A rank that is merely behind is no difference. The last 256 replays are known by key: ranks
// that compare no less often learn which replay was the first that differs. `report` (may be null) is written where they agree and where
// they do not: VMMGRAPH_ERROR_RANKS_DIFFER, on every rank the same one. From then on replays and eager scopes of the arena are refused
// with that status, rather than launched to wait for each other for ever, until vmmgraph_arena_restart_order. VMMGRAPH_ERROR_WRONG_STATE
// if the check is off, and if `gather` failed; VMMGRAPH_ERROR_INVALID_ARGUMENT for numbers of ranks that cannot be, and where it wrote
// something else.
//
// Arguments:
// `gather` is null or may be called with `user`; `report` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_compare_order(vmmgraph_arena_t arena,
                                               uint32_t rank,
                                               uint32_t ranks,
                                               vmmgraph_gather_fn gather,
                                               void *user,
                                               struct vmmgraph_order_report_t *report);

// As vmmgraph_arena_compare_order, before a launch, or before anything else that all ranks must do alike: also `next` must be the same, and
// no rank may be behind. It may be any number: the key of the space that is to be replayed, a hash of a step's mode and bucket, the
// layout_hash of what was just captured. It is not noted: the replay is. Where nobody has launched what differs (launched is 0 in the
// report), nothing is refused afterwards: the ranks may decide anew.
//
// Arguments:
// As vmmgraph_arena_compare_order.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_agree_on(vmmgraph_arena_t arena,
                                          uint64_t next,
                                          uint32_t rank,
                                          uint32_t ranks,
                                          vmmgraph_gather_fn gather,
                                          void *user,
                                          struct vmmgraph_order_report_t *report);

// Forgets what was launched and what differed: the check counts from 1 again. For all ranks at one point of their programs.
// VMMGRAPH_ERROR_WRONG_STATE if the check is off.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_arena_restart_order(vmmgraph_arena_t arena);

// What ranks know a space's replays by, in an arena with VMMGRAPH_ARENA_CHECK_ORDER; 0, as at first: its layout_hash. For spaces whose
// ranks differ in their blocks and not in what they run, for bump spaces, and for several graphs over one space, each with a key of its
// own set before it is replayed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_set_order_key(vmmgraph_space_t space,
                                               uint64_t key);

// Whether a prompt's KV memory is rather to go to the host than to be waited for (1 or 0): half of the time is over for which it may wait and
// still be in time. One that goes there at once has its first token early, and its others late.
//
// Arguments:
// `prompt` is null or readable, `to_host` null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_prompt_to_host(uint64_t now,
                                          const struct vmmgraph_prompt_t *prompt,
                                          int32_t *to_host);

// Whether a prefill of these prompts that `takes` so long is to wait for another step of the sequences that decode (1 or 0): behind it more than
// three in ten of those would be late, and none of the prompts presses, as one does that has no more patience, or of whose time to wait a tenth is
// left. One that is late already does not.
//
// Arguments:
// `prompts` points to `prompt_count` items and `decoding` to `decoding_count`, or that is 0; `waits` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_prefill_waits(uint64_t now,
                                         uint64_t takes,
                                         const struct vmmgraph_prompt_t *prompts,
                                         size_t prompt_count,
                                         const struct vmmgraph_decoding_t *decoding,
                                         size_t decoding_count,
                                         int32_t *waits);

// As vmmgraph_device_pause, for one region.
//
// Arguments:
// As vmmgraph_device_pause.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_pause(vmmgraph_region_t region,
                                        const struct vmmgraph_fence_t *fence,
                                        struct vmmgraph_pause_report_t *report);

// As vmmgraph_device_resume, for one region.
//
// Arguments:
// As vmmgraph_device_resume.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_resume(vmmgraph_region_t region,
                                         uint64_t deadline_micros,
                                         struct vmmgraph_resume_report_t *report);

// Pauses the regions and arenas with one of these tags; none: all of the device. Waits for the fence (null: nothing) and for what was given to the
// streams noted for their blocks; then pages go as their policy says. The caller submits nothing that uses them meanwhile.
//
// Goes on past failures: then the status is that of the first, `report` (may be null) is written all the same, what failed stays with
// its contents, and the next pause tries it again. What is paused already stays so. While a stream of the fence or of a block is
// being captured, it is VMMGRAPH_ERROR_STREAM_CAPTURING and nothing more is paused; while an arena has an open space, VMMGRAPH_ERROR_WRONG_STATE. The device's free pages go back to the driver too.
//
// Arguments:
// `tags` is null or points to `tag_count` zero-terminated strings; `fence` is null or points to a struct whose struct_size is set, with
// as many streams and recorded events as it says; `report` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_pause(vmmgraph_device_t device,
                                        const char *const *tags,
                                        size_t tag_count,
                                        const struct vmmgraph_fence_t *fence,
                                        struct vmmgraph_pause_report_t *report);

// Resumes the regions and arenas with one of these tags, all or none; no tag: all of the device. Returns when the contents are there. While there is no
// memory it asks again until the deadline, in microseconds from now; 0: as an allocation does. On failure everything is paused as
// before, the host has the contents, and the call can be repeated. What is there already stays. `report` may be null.
//
// Arguments:
// `tags` and `report` as in vmmgraph_device_pause.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_resume(vmmgraph_device_t device,
                                         const char *const *tags,
                                         size_t tag_count,
                                         uint64_t deadline_micros,
                                         struct vmmgraph_resume_report_t *report);

// As vmmgraph_device_resume, but returns as soon as everything is mapped. The contents are copied in the order of the tags; `ready` (may be
// null) receives a handle for the contents of each, which the caller destroys. A stream that needs a region's contents waits for
// them by vmmgraph_ready_before or vmmgraph_region_before.
//
// Arguments:
// As vmmgraph_device_resume; `ready` is null or points to `tag_count` handles.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_resume_async(vmmgraph_device_t device,
                                               const char *const *tags,
                                               size_t tag_count,
                                               uint64_t deadline_micros,
                                               vmmgraph_ready_t *ready,
                                               struct vmmgraph_resume_report_t *report);

// Calls `before_unmap` when memory with this tag is not used any more and is unmapped next, and `after_map` when it is there again, on
// other pages; an empty tag: of all regions. Either may be null. For registrations that hold pages: NCCL's, RDMA's.
//
// Arguments:
// `tag` is null or a zero-terminated string; the functions may be called with `user` from any thread until vmmgraph_pause_hooks_destroy
// and the pauses and resumes that were under way then have returned; `hooks` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_add_pause_hooks(vmmgraph_device_t device,
                                                  const char *tag,
                                                  vmmgraph_moved_fn before_unmap,
                                                  vmmgraph_moved_fn after_map,
                                                  void *user,
                                                  vmmgraph_pause_hooks_t *hooks);

// The hooks are called no more, but by pauses and resumes that are under way.
VMMGRAPH_API vmmgraph_status_t vmmgraph_pause_hooks_destroy(vmmgraph_pause_hooks_t hooks);

// Imports a page of `bytes` that another process exported (vmmgraph_page_extent_t's page_bytes); its memory stays as long as this does, whatever
// its owner does. The device was opened with VMMGRAPH_SHARING_FD. The descriptor stays the caller's and is not needed afterwards.
//
// Arguments:
// `fd` is open or negative; `page` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_import(vmmgraph_device_t device,
                                         int fd,
                                         uint64_t bytes,
                                         vmmgraph_peer_page_t *page);

// As vmmgraph_device_import, by what vmmgraph_device_export_fabric gave on this host or another. The device was granted VMMGRAPH_SHARING_FABRIC.
//
// Arguments:
// `handle` is null or points to one; `page` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_import_fabric(vmmgraph_device_t device,
                                                const struct vmmgraph_fabric_handle_t *handle,
                                                uint64_t bytes,
                                                vmmgraph_peer_page_t *page);

// Closes another process's page. Its memory stays where it is mapped.
VMMGRAPH_API vmmgraph_status_t vmmgraph_peer_page_close(vmmgraph_peer_page_t page);

// Maps the parts of another process's range, one behind the other, at addresses of this one's; `address` receives where it begins. All parts but the
// first begin where their page does, and all but the last end there.
//
// Arguments:
// `extents` points to `count` items; `map` and `address` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_peer_map_create(vmmgraph_device_t device,
                                           const struct vmmgraph_peer_extent_t *extents,
                                           size_t count,
                                           vmmgraph_peer_map_t *map,
                                           void **address);

// Notes that work of a stream uses the range: at its end its pages go behind what the stream was given by then. The stream exists until then.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_peer_map_used_by(vmmgraph_peer_map_t map,
                                            void *stream);

// Unmaps the range, once what was given to the noted streams is done; does not block. Work on streams that were not noted is done already.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_peer_map_destroy(vmmgraph_peer_map_t map);

// Sends descriptors, at most 253, and some bytes, at least one, as one message over a connected unix socket (SCM_RIGHTS): so no process need look into
// another one, which containers forbid. Those given here stay the caller's. `sent` (may be null) receives how many of the bytes went; the
// descriptors went with the first.
//
// Arguments:
// `socket` and the `count` items of `fds` are open or negative; `bytes` points to `length` bytes; `sent` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_send_descriptors(int socket,
                                            const int *fds,
                                            size_t count,
                                            const void *bytes,
                                            size_t length,
                                            uint64_t *sent);

// Receives what vmmgraph_send_descriptors sent, in one message: as many of the bytes as there is room for, and the descriptors, which are the caller's;
// those for which there is no room are closed again. `received` is 0 if the other side has closed.
//
// Arguments:
// `socket` is open or negative; `bytes` points to `length` writable bytes and `fds` to `capacity` writable items, or these are 0; `received` and
// `count` are null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_receive_descriptors(int socket,
                                               void *bytes,
                                               size_t length,
                                               uint64_t *received,
                                               int *fds,
                                               size_t capacity,
                                               size_t *count);

// The sizes of a VMMGRAPH_SIZES list up to `max`, at most 2^20, ascending. Writes at most `capacity` of them and how many there are.
//
// Arguments:
// `sizes` points to `capacity` writable numbers, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_sizes(int32_t list,
                                 uint32_t max,
                                 uint32_t *sizes,
                                 size_t capacity,
                                 size_t *count);

// The most ACL graphs that fit the streams of an Ascend device, by the formula of vLLM-Ascend's `update_aclgraph_sizes`; 0 if none does.
//
// Arguments:
// `streams` is null (the default: no layers, no groups) or points to a struct whose struct_size is set; `graphs` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_acl_graph_limit(const struct vmmgraph_acl_graph_streams_t *streams,
                                           uint32_t *graphs);

// Chooses the buckets that pad least for steps of these shapes, so many of each, within the limits: exactly along one axis, soundly along
// several. VMMGRAPH_ERROR_INVALID_ARGUMENT beyond 2^24 shapes times graphs of a variant, beyond 2^14 shapes of one that differ along several axes, and
// where there are too many variants for so many graphs. Writes at most `capacity` of them with what each buys, ascending; there are no more of them than shapes. `result` may be null.
//
// Arguments:
// `shapes` and `steps` point to `shape_count` items, or that is 0; `options` points to a struct whose struct_size is set, as `streams`
// in it does; `buckets` points to `capacity` writable buckets, or that is 0; `result` is null or points to a struct whose struct_size,
// curve and curve_capacity are set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_plan(const struct vmmgraph_key_t *shapes,
                                const uint64_t *steps,
                                size_t shape_count,
                                const struct vmmgraph_plan_options_t *options,
                                struct vmmgraph_planned_bucket_t *buckets,
                                size_t capacity,
                                struct vmmgraph_plan_result_t *result);

// What these buckets do with that traffic, to compare an engine's list with a plan. `weights` is null or has a weight for each axis; null
// and all 0: a token costs 1 and nothing else counts.
//
// Arguments:
// `buckets` points to `bucket_count` keys, `shapes` and `steps` to `shape_count` items, or those are 0; `weights` is null or points to
// four numbers; `waste` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_plan_evaluate(const struct vmmgraph_key_t *buckets,
                                         size_t bucket_count,
                                         const uint16_t *weights,
                                         const struct vmmgraph_key_t *shapes,
                                         const uint64_t *steps,
                                         size_t shape_count,
                                         struct vmmgraph_waste_t *waste);

// Whether the contents are there: 1, or 0.
//
// Arguments:
// `done` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ready_done(vmmgraph_ready_t ready, int32_t *done);

// Makes later work of a stream (CUstream or cudaStream_t) wait for the contents. Does not block. VMMGRAPH_ERROR_STREAM_CAPTURING while
// the stream is being captured.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ready_before(vmmgraph_ready_t ready,
                                        void *stream);

// Blocks the caller until the contents are there.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ready_wait(vmmgraph_ready_t ready);

// Forgets the handle; the contents come all the same.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ready_destroy(vmmgraph_ready_t ready);

// Asks `reclaim` for memory when the device or its budget is short, before a call fails: for an engine's caches, prefixes of prompts, idle models. Not
// where the budget of an account below it, an arena's, a region's, is, since only memory of that would help: see vmmgraph_account_add_reclaimer. It is told of all that the call lacks, in bytes,
// and may be called again for the same call as long as somebody gave something: eight times at most, and for a resume until its deadline.
//
// It is called from whichever thread runs short, by several at once, with no lock of the library's held, also while that thread captures: so it must not
// synchronize with the device there. It may call every function: shrink a cache, free blocks, destroy spaces and regions, pause other models, also one
// that another thread is resuming (it is paused while that thread is short of memory); what runs short on its thread meanwhile asks nobody. What it gives back must have come to the library's device: memory of torch's or of cudaMalloc counts where it went
// back to the driver.
//
// Those that cost least are asked first, until one gave enough: 0 are what regions and elastic memory do not use any more, 1 are addresses kept for eager work.
//
// Arguments:
// The function may be called with `user` from any thread until vmmgraph_reclaimer_destroy and the calls that were under way then have
// returned; `reclaimer` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_add_reclaimer(vmmgraph_device_t device,
                                                vmmgraph_reclaim_fn reclaim,
                                                uint64_t cost,
                                                void *user,
                                                vmmgraph_reclaimer_t *reclaimer);

// The function is asked no more, but by calls that are under way.
VMMGRAPH_API vmmgraph_status_t vmmgraph_reclaimer_destroy(vmmgraph_reclaimer_t reclaimer);

// Makes a region on a device, found by `tag`; several may have one tag. `options` may be null. The region keeps the device open.
//
// Arguments:
// `tag` is null or a zero-terminated string; `options` is null or points to a struct whose struct_size is set; `region` is null or
// writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_create(vmmgraph_device_t device,
                                         const char *tag,
                                         const struct vmmgraph_region_options_t *options,
                                         vmmgraph_region_t *region);

// Ends a handle, and with it the region and all its blocks, paused or not. Their memory goes behind what was given to the streams
// noted for them.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_destroy(vmmgraph_region_t region);

// Allocates a block, used on `stream` first. Its address stays the same for as long as it lives. `policy` is one of
// VMMGRAPH_POLICY_*. VMMGRAPH_ERROR_WRONG_STATE while the region is paused. The stream exists until the block is freed. Where contents of blocks that
// are gone still come back (vmmgraph_device_resume_async), the stream's later work waits for them, or the call if the stream is being captured.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_allocate(vmmgraph_region_t region,
                                           uint64_t bytes,
                                           int32_t policy,
                                           void *stream,
                                           void **block);

// Frees a block, also while the region is paused. Its bytes are another's behind what its streams were given.
VMMGRAPH_API vmmgraph_status_t vmmgraph_region_free(vmmgraph_region_t region, void *block);

// Notes that a stream uses a block: a free and a pause wait for what it was given by then. The stream exists until the block is freed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_record_stream(vmmgraph_region_t region,
                                                void *block,
                                                void *stream);

// Says that a block was written since its backup, or (null) that all were: the next pause of a VMMGRAPH_REGION_READ_ONLY region
// copies it again.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_mark_written(vmmgraph_region_t region,
                                               void *block);

// Copies `bytes` bytes of a paused block's backup, from `skip` on, to `into`, without resuming: all of them, or it is an error and
// `into` stays as it was.
//
// Arguments:
// `into` is null or points to `bytes` writable bytes.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_get_backup(vmmgraph_region_t region,
                                             void *block,
                                             uint64_t skip,
                                             void *into,
                                             size_t bytes);

// Makes later work of a stream wait for contents that a resume without waiting still copies. Does not block. VMMGRAPH_ERROR_WRONG_STATE unless the
// region is resident: what is paused, or on its way on another thread, must not be used.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_before(vmmgraph_region_t region,
                                         void *stream);

// Limits the bytes of physical memory that the region may hold; 0: no limit but the device's. Nothing is taken away.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_set_budget(vmmgraph_region_t region,
                                             uint64_t bytes);

// What the region holds now. Pages go on which nothing is left, if what freed blocks waited for is over by now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_region_stats(vmmgraph_region_t region,
                                        struct vmmgraph_region_stats_t *stats);

// Makes a ring over these units, in the order of use: addresses for each, pages for the slots and for the resident ones. Nothing is copied
// yet. What it comes to at best, where the link's speed is given, and what is otherwise than asked are logged, and said by vmmgraph_ring_places. `options` may be null. The ring keeps the device open. Out of
// memory, budget or addresses leaves everything as it was; VMMGRAPH_ERROR_INVALID_ARGUMENT on a platform where a page shows once.
//
// Arguments:
// `units` points to `unit_count` units, or that is 0; `options` is null or points to a struct whose struct_size is set, and whose name is
// null or a zero-terminated string; `ring` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_create(vmmgraph_device_t device,
                                       const struct vmmgraph_ring_unit_t *units,
                                       size_t unit_count,
                                       const struct vmmgraph_ring_options_t *options,
                                       vmmgraph_ring_t *ring);

// Ends a handle, and with it the ring, in use or not. Waits for nobody: addresses and pages go behind the copies and the readers there are, a unit
// that is still acquired behind everything that its stream has been given by now. That stream exists until then.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_destroy(vmmgraph_ring_t ring);

// The first address of a unit, counted from 0. It never changes, resident or streamed; its contents are there from the unit's acquire to its
// release only.
//
// Arguments:
// `address` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_address(vmmgraph_ring_t ring,
                                        size_t unit,
                                        void **address);

// Where each unit's contents are. Writes the places of at most `capacity` units, by unit, and to `result` what they come to, as
// vmmgraph_ring_schedule does; either may be null.
//
// Arguments:
// `places` points to `capacity` writable places, or that is 0; `result` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_places(vmmgraph_ring_t ring,
                                       struct vmmgraph_ring_place_t *places,
                                       size_t capacity,
                                       struct vmmgraph_ring_schedule_t *result);

// Says what a unit is copied from, from its next acquire on; no runs: that it needs no copy, and finds whatever its slot holds. Runs that lie behind
// one another on both sides are one copy. The ring keeps the buffers. What reads the unit now goes on with what it has; a copy of the old
// source that is under way is finished, and done again from the new one before the unit is read. Does not block.
// VMMGRAPH_ERROR_INVALID_ARGUMENT for a run beyond the unit's end or its source's, one on another's bytes, and a source of another device; the
// source is as before then.
//
// Arguments:
// `runs` points to `run_count` runs, or that is 0.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_set_source(vmmgraph_ring_t ring,
                                           size_t unit,
                                           const struct vmmgraph_host_run_t *runs,
                                           size_t run_count);

// Makes later work of a stream find a unit's bytes at its addresses, until vmmgraph_ring_release. Does not block, unless a source is not registered.
// The units behind it are copied ahead, as far as their slots are free: any order of units is right, the order of use is fast. Work reads the
// unit only; what it writes there is lost. VMMGRAPH_ERROR_WRONG_STATE if the unit has no source, is acquired, or another of its slot is;
// VMMGRAPH_ERROR_STREAM_CAPTURING while the stream is captured. It is not acquired then, and the call can be repeated. The stream exists
// until the release.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_acquire(vmmgraph_ring_t ring,
                                        size_t unit,
                                        void *stream);

// Says that what a stream was given so far is the last that reads a unit's bytes: its slot is filled again behind that. A stream other than that of the
// acquire is one whose work is behind all that read the unit. VMMGRAPH_ERROR_WRONG_STATE unless it is acquired;
// VMMGRAPH_ERROR_STREAM_CAPTURING while the stream is captured. It is still acquired then, and the call can be repeated. Does not block.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_release(vmmgraph_ring_t ring,
                                        size_t unit,
                                        void *stream);

// Copies the resident units and the first ones that stream, where their places do not hold what they are to: before the first step, after an
// abort, when sources have changed. Places that are read now are left as they are. `filled`, which may be null, is how many units were.
// VMMGRAPH_ERROR_WRONG_STATE for a unit without a source; those before it are filled then.
//
// Arguments:
// `filled` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_prime(vmmgraph_ring_t ring,
                                      uint64_t *filled);

// A step ends before its end: every unit that is acquired is released behind all that its stream was given, and what places hold counts no more, so
// that the next use of a unit copies it again. Sources stay. Does not fail; a stream that is captured is asked again later.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_abort(vmmgraph_ring_t ring);

// What a ring holds now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ring_stats(vmmgraph_ring_t ring, struct vmmgraph_ring_stats_t *stats);

// A step is being captured on `stream`, which is under capture, from here on: vmmgraph_ring_acquire and vmmgraph_ring_release with a stream under capture
// are part of it, and no bytes move. Every unit that streams is acquired once, in the order of use, and released in that order. `options` may be null. One
// capture at a time; eager work may go on beside it. VMMGRAPH_ERROR_WRONG_STATE if one is under way or the stream is not captured;
// VMMGRAPH_ERROR_INVALID_ARGUMENT on a platform whose graphs the library does not know.
//
// Arguments:
// `options` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_capture_begin(vmmgraph_ring_t ring,
                                              void *stream,
                                              const struct vmmgraph_ring_capture_options_t *options);

// The end of the step, before that of the stream's capture: nothing of the ring is captured behind it. VMMGRAPH_ERROR_WRONG_STATE unless a capture is
// under way, if a call of it failed, or if units were not acquired or not released; it is given up then.
//
// Arguments:
// `graph` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_capture_end(vmmgraph_ring_t ring,
                                            void *stream,
                                            vmmgraph_ring_graph_t *graph);

// Gives a capture up: the graph, if there is one, is not to be launched. Nothing if none is under way.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ring_capture_abandon(vmmgraph_ring_t ring);

// Ends a handle: the graph is launched no more.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ring_graph_destroy(vmmgraph_ring_graph_t graph);

// How many copies the graph has, those that have nothing to copy included.
//
// Arguments:
// `copies` is null or writable.
VMMGRAPH_API vmmgraph_status_t vmmgraph_ring_graph_copies(vmmgraph_ring_graph_t graph, uint64_t *copies);

// The executable that was launched last is gone, or was updated otherwise: the next one is told everything, also where it has the same handle.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_graph_forget_executable(vmmgraph_ring_graph_t graph);

// Before each launch: brings resident units, and those that the graph expects to be there; tells the executable what has changed in the sources; and
// makes `stream` wait for eager work of the ring. Until vmmgraph_ring_graph_leave, which must follow whatever happens, the ring is its. Sources that are set
// meanwhile count from the next launch on; to write host memory that it reads is VMMGRAPH_ERROR_WRONG_STATE meanwhile.
//
// VMMGRAPH_ERROR_WRONG_STATE beside another launch, while a unit is acquired, and for a unit without a source; VMMGRAPH_ERROR_INVALID_ARGUMENT for one with
// more runs than the graph has copies; VMMGRAPH_ERROR_STREAM_CAPTURING. There is nothing to leave then, and the call can be repeated.
//
// Arguments:
// `executable` is null or the driver's executable graph (CUgraphExec), made of the graph that this was captured into, which is there, and
// nobody else uses it meanwhile. What it was told before is as it was, unless vmmgraph_ring_graph_forget_executable was called.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_graph_enter(vmmgraph_ring_graph_t graph,
                                            void *executable,
                                            void *stream);

// Behind vmmgraph_ring_graph_enter: the graph was launched on `stream` (1), or nothing was, or it is not known (0).
// VMMGRAPH_ERROR_WRONG_STATE if it was not entered.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_graph_leave(vmmgraph_ring_graph_t graph,
                                            void *stream,
                                            int32_t launched);

// Which of these units would stream, through which of so many slots (0: three). Plain arithmetic: nothing is made, no device is asked, and any
// thread may call it. Writes the places of at most `capacity` units, by unit, and to `result` what they come to; either may be null.
// VMMGRAPH_ERROR_INVALID_ARGUMENT without units, and with VMMGRAPH_REMAINDER_REFUSE if the slots do not divide those that stream.
//
// Arguments:
// `units` points to `unit_count` units, or that is 0; `places` points to `capacity` writable places, or that is 0; `result` is null or
// points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_schedule(const struct vmmgraph_ring_unit_t *units,
                                         size_t unit_count,
                                         size_t slots,
                                         int32_t remainder,
                                         struct vmmgraph_ring_place_t *places,
                                         size_t capacity,
                                         struct vmmgraph_ring_schedule_t *result);

// The best that a ring can do for such a step: bytes over the link, seconds, tokens a second, and what bounds them. Plain arithmetic, as
// vmmgraph_ring_schedule. Slots that do not fit the budget become fewer. Writes at most `capacity` rows of what more residency
// would buy, from the next more up to all and 256 at most, as far as the budget holds them. VMMGRAPH_ERROR_INVALID_SIZE for a unit that is empty or too long, and
// if the budget does not hold one slot and what is to be resident; VMMGRAPH_ERROR_INVALID_ARGUMENT for a link without speed and for times that are none.
//
// Arguments:
// `demand` is null or points to a struct whose struct_size is set, with as many units as it says; `rows` points to `capacity` writable
// rows, or that is 0; `result` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_ceiling(const struct vmmgraph_ring_demand_t *demand,
                                        struct vmmgraph_ring_residency_t *rows,
                                        size_t capacity,
                                        struct vmmgraph_ring_ceiling_t *result);

// The same in words, for people and logs, a line each: what bounds a step, everything that is otherwise than asked, what residency would buy, and from
// where on the work hides the link.
// Copies as vmmgraph_last_error_message does.
//
// Arguments:
// `demand` as in vmmgraph_ring_ceiling; `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_ring_ceiling_text(const struct vmmgraph_ring_demand_t *demand,
                                             char *buffer,
                                             size_t capacity,
                                             size_t *needed);

// The pages behind a range of the space's addresses, such as a block's, in order: as many as there is room for, and how many there are. Asks nothing
// of the driver and pins nothing. A seal may exchange pages under retained blocks: ask again after it.
//
// Arguments:
// `extents` points to `capacity` writable items, or `capacity` is 0; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_export(vmmgraph_space_t space,
                                        void *base,
                                        uint64_t bytes,
                                        struct vmmgraph_page_extent_t *extents,
                                        size_t capacity,
                                        size_t *count);

// A page of an arena for other processes: a file descriptor, the caller's to send and to close, by which they import it; once a page, however many
// graphs show it. The page is pinned once more (vmmgraph_device_page_exported): until that is taken away it is not given back, lent, paused or
// exchanged. The device was opened with VMMGRAPH_SHARING_FD.
//
// Arguments:
// `fd` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_export_page(vmmgraph_device_t device,
                                              uint64_t page,
                                              int *fd);

// As vmmgraph_device_export_page, for processes of other hosts too, by a handle of the fabric: 64 bytes to be sent as they are, good as long as the page is
// pinned. VMMGRAPH_ERROR_WRONG_STATE unless the device was granted VMMGRAPH_SHARING_FABRIC.
//
// Arguments:
// `handle` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_export_fabric(vmmgraph_device_t device,
                                                uint64_t page,
                                                struct vmmgraph_fabric_handle_t *handle);

// Says that so many processes more have a page, or, with a negative number, fewer: pins that vmmgraph_device_export_page made go so, when the
// processes have closed the page or are gone. With more, the page need not be exported by this library. Pins that are left when the device closes
// go with it.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_page_exported(vmmgraph_device_t device,
                                                uint64_t page,
                                                int32_t delta);

// Opens a space for a capture. The arena's pages stay while the space does, also after the arena is destroyed. Replays so far are
// marked, so that their stream may be captured; whatever state that stream is in, this does not fail because of it.
//
// Arguments:
// `space` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_open(vmmgraph_arena_t arena,
                                      vmmgraph_space_t *space);

// Opens a bump space for a capture: its blocks lie behind one another and none of their addresses serves twice. For the segments
// of a torch MemPool, which stay until the graph goes. Its seal leaves live blocks on shared pages.
//
// Arguments:
// As [`vmmgraph_space_open`].
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_open_bump(vmmgraph_arena_t arena,
                                           vmmgraph_space_t *space);

// Names a space after the shape that it is for ("decode 64"): in statistics, log lines, the message of what fails for lack of memory, and
// on the page map. The text, UTF-8 of 1024 bytes at most, is copied; an empty one takes the name away.
//
// Arguments:
// `label` is null or a zero-terminated string.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_set_label(vmmgraph_space_t space,
                                           const char *label);

// Says where in the caller's program a space is captured ("model.cpp:120"), for the page map. The text, UTF-8 of 1024 bytes at most, is
// copied; an empty one takes it away.
//
// Arguments:
// `site` is null or a zero-terminated string.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_set_site(vmmgraph_space_t space,
                                          const char *site);

// The label of a space; empty if it has none. Copies as vmmgraph_last_error_message does.
//
// Arguments:
// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_label(vmmgraph_space_t space,
                                       char *buffer,
                                       size_t capacity,
                                       size_t *needed);

// Destroys a space. Does not block: once its arena's replays so far are done, it is unmapped and its addresses go back, by whoever comes
// by then: the end of something else, vmmgraph_arena_trim, vmmgraph_device_trim, or an allocation that is short of memory. Its graph must
// be gone, or never be launched again. Pages under blocks that a torch tensor still owns stay until that is freed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_destroy(vmmgraph_space_t space);

// Allocates a block of at least `bytes` for work on `stream` (a CUstream or cudaStream_t; null: the default stream), aligned to
// 512 bytes, with undefined contents. May be called while the stream is captured. On failure nothing has changed.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_allocate(vmmgraph_space_t space,
                                          uint64_t bytes,
                                          void *stream,
                                          void **block);

// As vmmgraph_space_allocate, for a block that the caller will keep when the capture ends: an output, a workspace. The kept blocks of
// all spaces lie packed on common pages, each on bytes of its own until it is freed and its space is destroyed, so that a few KiB do
// not cost a page.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_allocate_kept(vmmgraph_space_t space,
                                               uint64_t bytes,
                                               void *stream,
                                               void **block);

// As vmmgraph_space_allocate, for a block that peers use too: a buffer of a captured collective, which other devices or processes read and write by
// what they were told of its page, by vmmgraph_space_export or by a library that registers what it meets in the capture. It lies on one page, or, if it
// is longer than a large page, on whole ones (its bytes are rounded up to those); beside it lie remote blocks of the same stream only. So a seal, which
// exchanges pages under local blocks that are retained, exchanges none that a peer knows, and such pages are neither lent nor given to eager work from
// the seal on. Other graphs share them as any page: what peers do with it is over when the replay is. Free it before the seal: one that is live then
// is treated as the policy says and counted in the report. VMMGRAPH_ERROR_WRONG_STATE in a bump space.
//
// Arguments:
// `block` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_allocate_remote(vmmgraph_space_t space,
                                                 uint64_t bytes,
                                                 void *stream,
                                                 void **block);

// Frees a block. Before the seal its pages serve the next block of the same stream; afterwards a retained block's pages return
// to the arena, once the streams noted for it have passed. Its addresses stay mapped, since the graph writes there.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_free(vmmgraph_space_t space,
                                      void *block);

// Notes that `stream` uses the block as well. During the capture: once freed, it stays busy until the seal. After it: once freed, its
// bytes are nobody else's before what `stream` was given until then is done.
//
// Arguments:
// `stream` is a stream of the device that exists until the block is freed or its space destroyed.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_record_stream(vmmgraph_space_t space,
                                               void *block,
                                               void *stream);

// Ends the capture. Blocks that are still live are treated as `retain` (one of VMMGRAPH_RETAIN_*) says. `report` may be null. On
// failure the space is open as before, and the call can be repeated.
//
// Arguments:
// `report` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_seal(vmmgraph_space_t space,
                                      int32_t retain,
                                      struct vmmgraph_seal_report_t *report);

// Blocks the caller until the replays of the arena that were launched so far are done, this space's among them: afterwards what its
// graph reads and writes may go. Destroying the space does not wait. VMMGRAPH_ERROR_STREAM_CAPTURING if the stream of the last replay is
// being captured and was not marked before.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_wait(vmmgraph_space_t space);

// Puts a mark behind the arena's replays so far, so that the stream of the last one may be destroyed: for whoever replays on streams that may not
// last. Costs a record, and the next replay a wait, on that stream too. `vmmgraph_arena_mark` does what else waits for the end of a stream as well.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_mark(vmmgraph_space_t space);

// Calls `launch(user)`, which gives the space's graph to `stream`, in order after every earlier replay of the arena: no two of
// them overlap, whatever their streams and threads. The same stream as the last replay costs one question to the driver: a stream under
// capture is VMMGRAPH_ERROR_STREAM_CAPTURING, and its capture goes on.
//
// Arguments:
// `launch` is null or may be called with `user`; it must not throw.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_replay(vmmgraph_space_t space,
                                        void *stream,
                                        vmmgraph_launch_fn launch,
                                        void *user);

// vmmgraph_space_replay for whoever cannot launch from a callback, as a language with a lock of its own: what this thread gives to `stream`
// until it calls vmmgraph_space_leave is in order after every earlier replay of the arena. Until then other replays of the arena wait, so
// leave whatever happens. On failure there is nothing to leave. As the other one beyond that.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_enter(vmmgraph_space_t space,
                                       void *stream);

// Ends what vmmgraph_space_enter began on this thread. VMMGRAPH_ERROR_WRONG_STATE if it has not entered.
VMMGRAPH_API vmmgraph_status_t vmmgraph_space_leave(vmmgraph_space_t space);

// The blocks that are live now, in address order: after the seal, those that were retained and not freed since. Copies at most
// `capacity` pointers and writes how many there are to `count`. `blocks` may be null if capacity is 0.
//
// Arguments:
// `blocks` points to `capacity` writable pointers; `count` is null or writable.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_live_blocks(vmmgraph_space_t space,
                                             void **blocks,
                                             size_t capacity,
                                             size_t *count);

// What the space uses now.
//
// Arguments:
// `stats` is null or points to a struct whose struct_size is set.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_space_stats(vmmgraph_space_t space,
                                       struct vmmgraph_space_stats_t *stats);

// Makes `arena` the one that vmmgraph_torch_alloc uses on its device, in place of a default one. It stays so, also after its
// handle is destroyed, until another takes its place. Null: the next call makes a default one on device `device` again.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_torch_set_arena(int32_t device,
                                           vmmgraph_arena_t arena);

// Allocates in the current space of the device's arena: the `alloc_fn` of torch's CUDAPluggableAllocator. Null, with
// vmmgraph_last_error set, if that fails; torch makes its own out-of-memory error of it.
VMMGRAPH_API
void *vmmgraph_torch_alloc(ptrdiff_t size,
                           int32_t device,
                           void *stream);

// Frees such a block: the `free_fn` of torch's CUDAPluggableAllocator. A failure is kept for vmmgraph_last_error and logged.
VMMGRAPH_API
void vmmgraph_torch_free(void *block,
                         ptrdiff_t _size,
                         int32_t device,
                         void *_stream);

// Waits until nobody is between vmmgraph_device_begin_capture or _begin_replay and its end, and keeps everybody else out until
// vmmgraph_device_end_capture on this thread: for engines that want no replay while they capture. Nothing else looks at this gate.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_begin_capture(vmmgraph_device_t device);

// Lets the others in again.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_end_capture(vmmgraph_device_t device);

// Waits until nobody captures or waits to, and keeps captures out until vmmgraph_device_end_replay on this thread. Any number of
// threads may be in here at once, each any number of times.
VMMGRAPH_API
vmmgraph_status_t vmmgraph_device_begin_replay(vmmgraph_device_t device);

// Ends what this thread's last vmmgraph_device_begin_replay began.
VMMGRAPH_API vmmgraph_status_t vmmgraph_device_end_replay(vmmgraph_device_t device);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VMMGRAPH_H */
