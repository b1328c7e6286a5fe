/*
 * The C names of torch_memory_saver over VmmGraph's regions: what a thread allocates inside an "interesting region" can step aside and
 * come back at the same addresses. They are in a library of its own, libvmmgraph_memory_saver.so, since that also has cudaMalloc and
 * cudaFree: nobody who links VmmGraph alone is hooked. It works over the core that the process has, libvmmgraph.so's or
 * libvmmgraph_torch.so's, and opens the libvmmgraph.so beside itself where there is none when it first needs one. Two ways to use it:
 *
 *   LD_PRELOAD=libvmmgraph_memory_saver.so engine     cudaMalloc and cudaFree of a program with a shared CUDA runtime are the library's
 *   torch.cuda.memory.CUDAPluggableAllocator(path, "tms_torch_malloc", "tms_torch_free")     nothing is hooked
 *
 * Conventions
 *   - Results are 0 or a cudaError_t. Nothing ends the process: where the original does, the call returns an error and changes nothing.
 *     tms_last_error says why, also after functions that return none.
 *   - What a thread has set is that thread's, and begins as the environment says: TMS_INIT_ENABLE, TMS_INIT_ENABLE_CPU_BACKUP,
 *     TMS_INIT_CPU_BACKUP_BACKEND (each thread), TMS_RETAIN_CPU_BACKUP (the process). Booleans are 1, true, yes, 0, false, no.
 *   - A tag is a VmmGraph tag: vmmgraph_device_add_pause_hooks hears of it, and pausing it pauses regions of the program that have the
 *     same one. Memory is that of the device's primary context.
 *   - Blocks with a tag lie packed on common pages. A free gives the pages back that nothing is left on.
 *   - All functions are thread-safe. A child made by fork gets cudaErrorInitializationError (3), if its parent had used a region.
 *
 * cudaMalloc and cudaFree
 *   Outside an interesting region they are the runtime's own, and so they are for null, for zero bytes, and for pointers from elsewhere.
 *   Inside, memory comes from the calling thread's current device, also during a capture. cudaErrorMemoryAllocation (2) is then the
 *   runtime's last error as well. cudaFree waits for the device, as the runtime's does; where it cannot, since a stream is being
 *   captured, it says so and frees nothing. Not hooked: cudaMallocAsync, cudaMallocManaged, cuMemAlloc, a static runtime.
 *   cudaStreamBeginCapture, cudaStreamBeginCaptureToGraph and cudaStreamEndCapture are put before the runtime's too, and note which captures
 *   are under way, since no wait for a device may be made then; one begins when no wait is under way.
 */

#ifndef VMMGRAPH_MEMORY_SAVER_H
#define VMMGRAPH_MEMORY_SAVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "vmmgraph.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether this thread's allocations can step aside from now on.
VMMGRAPH_API void tms_set_interesting_region(bool interesting);
VMMGRAPH_API bool tms_get_interesting_region(void);

// The tag of this thread's next allocations; "default" at first. Copied. Null is refused.
VMMGRAPH_API void tms_set_current_tag(const char* tag);
// Valid as long as the process.
VMMGRAPH_API const char* tms_get_current_tag(void);

// Whether the contents of this thread's next allocations go to host memory and come back; else they are lost.
VMMGRAPH_API void tms_set_enable_cpu_backup(bool enable);
VMMGRAPH_API bool tms_get_enable_cpu_backup(void);

// "pinned" or "mmap"; others are refused. Kept for those who ask: there is one pool of host memory, pinned where that is granted.
VMMGRAPH_API void tms_set_cpu_backup_backend(const char* backend);
VMMGRAPH_API const char* tms_get_cpu_backup_backend(void);

// There is no backup on disk: enabling it is refused (cudaErrorNotSupported, 801), the getter says false, the folder is ignored.
VMMGRAPH_API void tms_set_enable_disk_backup(bool enable);
VMMGRAPH_API bool tms_get_enable_disk_backup(void);
VMMGRAPH_API void tms_set_disk_backup_dir(const char* folder);

// Memory with the tag steps aside, on every device; null or "": all of it. Waits for these devices first; the caller submits nothing
// more that uses the memory. While a stream is captured it is refused: cudaErrorStreamCaptureUnsupported (900). Where nothing is preloaded,
// a capture on a stream that was created as non-blocking is seen only if tms_watch_streams named the stream; else the wait ends it, as any
// wait for the device would. What is paused stays so, and
// a tag that nobody has is nothing to do. Goes on past failures and returns the first; what failed keeps its contents, and the next call
// tries it again.
VMMGRAPH_API int tms_pause(const char* tag);

// The memory comes back, with its contents where there is a backup, before the call returns; null or "": all of it. On each device all
// of it or nothing: after cudaErrorMemoryAllocation (2) it is paused as before, and the call can be repeated. What is there stays.
VMMGRAPH_API int tms_resume(const char* tag);

// `bytes` bytes of backup of paused memory, from `ptr` on, which may be inside a block: a copy that the library owns, valid until the
// memory is resumed or freed. Null while the memory is there, and null with an error if it is not the library's or has no backup.
VMMGRAPH_API uint8_t* tms_get_cpu_backup_pointer(const uint8_t* ptr, uint64_t bytes);
// With true, such copies stay when memory is resumed, and the function above gives them meanwhile; after the next pause the same
// pointer has the new contents as soon as it is asked for.
VMMGRAPH_API void tms_set_retain_cpu_backup(bool retain);
VMMGRAPH_API bool tms_get_retain_cpu_backup(void);

// An allocation in a region that would leave fewer bytes of the device free is out of memory; 0, the default: none is.
VMMGRAPH_API void set_memory_margin_bytes(uint64_t bytes);

// For CUDAPluggableAllocator. Null where the original ends the process: without memory, and outside an interesting region
// (cudaErrorIllegalState, 401). `stream` is a cudaStream_t and not kept: a free and a pause wait for the whole device.
VMMGRAPH_API void* tms_torch_malloc(ssize_t bytes, int device, void* stream);
VMMGRAPH_API void tms_torch_free(void* ptr, ssize_t bytes, int device, void* stream);

// Streams whose captures a wait for the device shall not end. They exist as long as the process, as torch's own streams do; naming one twice
// is naming it once. For those who preload nothing. Not one of torch_memory_saver's.
VMMGRAPH_API int tms_watch_streams(void* const* streams, size_t count);

// Whether a capture is known to be under way, which a pause and a free would refuse to disturb. Not
// one of torch_memory_saver's.
VMMGRAPH_API bool tms_is_capturing(void);

// From now on a pause and a resume of the tag, or of all, include the arenas of VmmGraph that were
// made with this tag on the device. For captured graphs, whose memory is an arena's. Not one of
// torch_memory_saver's.
VMMGRAPH_API int tms_include_arenas(const char* tag, int device);

// This thread's last failure since it last asked, and 0 from then on. `message` may be null; the text is valid until the thread's next
// failure. Not one of torch_memory_saver's.
VMMGRAPH_API int tms_last_error(const char** message);

#ifdef __cplusplus
}
#endif

#endif  // VMMGRAPH_MEMORY_SAVER_H
