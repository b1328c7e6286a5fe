/*
 * C names of torch_memory_saver over VmmGraph's regions: memory allocated by a thread inside an
 * "interesting region" can be paused, and resumed at the same addresses. A separate library,
 * libvmmgraph_memory_saver.so, since cudaMalloc and cudaFree are in it too: linking VmmGraph alone
 * hooks nothing. Uses the core already in the process, libvmmgraph.so's or libvmmgraph_torch.so's;
 * else opens the libvmmgraph.so beside itself when first needed. Two ways to use the library:
 *
 *   LD_PRELOAD=libvmmgraph_memory_saver.so engine
 *       hooks cudaMalloc and cudaFree of a program with a shared CUDA runtime
 *   torch.cuda.memory.CUDAPluggableAllocator(path, "tms_torch_malloc", "tms_torch_free")
 *       hooks nothing
 *
 * Conventions
 *   - Results are 0 or a cudaError_t. No call ends the process: where the original does, the call
 *     returns an error and changes nothing. tms_last_error tells the reason, also for functions
 *     without a result.
 *   - Settings belong to their thread, and start as in the environment: TMS_INIT_ENABLE,
 *     TMS_INIT_ENABLE_CPU_BACKUP, TMS_INIT_CPU_BACKUP_BACKEND (each thread), TMS_RETAIN_CPU_BACKUP
 *     (the process). Booleans are 1, true, yes, 0, false, no.
 *   - A tag is a VmmGraph tag: vmmgraph_device_add_pause_hooks covers the tag, and a pause includes
 *     the program's regions with the same tag. Memory belongs to the device's primary context.
 *   - Blocks of a tag are packed on common pages. A free returns pages without blocks.
 *   - All functions are thread-safe. A child made by fork gets cudaErrorInitializationError (3) if
 *     its parent used a region.
 *
 * cudaMalloc and cudaFree
 *
 * Outside an interesting region, and for null, zero bytes and foreign pointers, the calls are the
 * runtime's own. Inside, memory comes from the calling thread's current device, also during a
 * capture; cudaErrorMemoryAllocation (2) is then the runtime's last error too. cudaFree waits for
 * the device, as the runtime's does; if a capture forbids the wait, cudaFree returns an error and
 * frees nothing. Not hooked: cudaMallocAsync, cudaMallocManaged, cuMemAlloc, a static runtime.
 * cudaStreamBeginCapture, cudaStreamBeginCaptureToGraph and cudaStreamEndCapture are hooked to
 * track captures, during which no wait for a device is allowed; a capture begins only when no wait
 * is in progress.
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

// Makes this thread's allocations pausable from now on, or not.
VMMGRAPH_API void tms_set_interesting_region(bool interesting);
VMMGRAPH_API bool tms_get_interesting_region(void);

// The tag of this thread's next allocations; "default" at first. Copied. Null is refused.
VMMGRAPH_API void tms_set_current_tag(const char* tag);
// Valid as long as the process.
VMMGRAPH_API const char* tms_get_current_tag(void);

// Whether contents of this thread's next allocations are backed up in host memory; else lost.
VMMGRAPH_API void tms_set_enable_cpu_backup(bool enable);
VMMGRAPH_API bool tms_get_enable_cpu_backup(void);

// "pinned" or "mmap"; other names are refused. One host memory pool serves both, pinned where
// granted. A resume of memory with "mmap" returns the pool's unused memory to the system.
VMMGRAPH_API void tms_set_cpu_backup_backend(const char* backend);
VMMGRAPH_API const char* tms_get_cpu_backup_backend(void);

// Whether contents of this thread's next allocations go to files while paused; then a backup in
// host memory has no effect. A pause that cannot write a file (cudaErrorOperatingSystem, 304)
// leaves the device's memory of these tags unpaused. A resume checks the files first: if one is
// missing or was changed (cudaErrorFileNotFound, 301), nothing is resumed.
VMMGRAPH_API void tms_set_enable_disk_backup(bool enable);
VMMGRAPH_API bool tms_get_enable_disk_backup(void);
// Folder of files written from now on; at first TMS_DISK_BACKUP_DIR, else TMPDIR, else /tmp.
VMMGRAPH_API void tms_set_disk_backup_dir(const char* folder);

// Pauses the memory with the tag on every device; null or "": all. Waits for these devices first;
// the caller must not submit further work on the memory. Refused during a capture:
// cudaErrorStreamCaptureUnsupported (900). Without preloading, a capture on a non-blocking stream
// is known only after tms_watch_streams; else the wait ends the capture, as any device wait would.
// No effect on paused memory and unknown tags. Goes on past failures and returns the first; failed
// memory keeps its contents, and the next call retries.
VMMGRAPH_API int tms_pause(const char* tag);

// Resumes the memory with the tag, with backed-up contents, before returning; null or "": all. All
// or nothing per device: after cudaErrorMemoryAllocation (2) the memory is still paused, and the
// call can be repeated. No effect on resident memory.
VMMGRAPH_API int tms_resume(const char* tag);

// Returns `bytes` bytes of the backup of paused memory from `ptr` on, which may be inside a block:
// a copy owned by the library, valid until the memory is resumed or freed. Null while the memory is
// resident; null with an error for foreign memory or without a backup.
VMMGRAPH_API uint8_t* tms_get_cpu_backup_pointer(const uint8_t* ptr, uint64_t bytes);
// With true, copies stay available after a resume. After the next pause, the same pointer has the
// new contents once requested again.
VMMGRAPH_API void tms_set_retain_cpu_backup(bool retain);
VMMGRAPH_API bool tms_get_retain_cpu_backup(void);

// An allocation in a region which would leave fewer free bytes on the device is out of memory; 0,
// the default: no limit.
VMMGRAPH_API void set_memory_margin_bytes(uint64_t bytes);

// For CUDAPluggableAllocator. Null where the original ends the process: out of memory, and outside
// an interesting region (cudaErrorIllegalState, 401). `stream` is a cudaStream_t and not stored: a
// free and a pause wait for the whole device.
VMMGRAPH_API void* tms_torch_malloc(ssize_t bytes, int device, void* stream);
VMMGRAPH_API void tms_torch_free(void* ptr, ssize_t bytes, int device, void* stream);

// Names streams whose captures a device wait must not end; repeated names have no effect. The
// streams must exist as long as the process, as torch's own do. For use without preloading. Not a
// torch_memory_saver name.
VMMGRAPH_API int tms_watch_streams(void* const* streams, size_t count);

// Returns true if a capture is known to be running, in which case a pause and a free refuse. Not a
// torch_memory_saver name.
VMMGRAPH_API bool tms_is_capturing(void);

// Makes pauses and resumes of the tag, or of all, include VmmGraph arenas with this tag on the
// device, which hold the memory of captured graphs. Not a torch_memory_saver name.
VMMGRAPH_API int tms_include_arenas(const char* tag, int device);

// Returns this thread's last failure since the previous call, then 0. `message` may be null; the
// text is valid until the thread's next failure. Not a torch_memory_saver name.
VMMGRAPH_API int tms_last_error(const char** message);

#ifdef __cplusplus
}
#endif

#endif  // VMMGRAPH_MEMORY_SAVER_H
