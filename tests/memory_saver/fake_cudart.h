/* Fake CUDA runtime: host memory, call counts, and failures on demand. Its symbols are versioned
 * like the real ones. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

int cudaMalloc(void** ptr, size_t bytes);
int cudaFree(void* ptr);
int cudaGetDevice(int* device);
int cudaSetDevice(int device);
int cudaMemGetInfo(size_t* free, size_t* total);
int cudaDeviceSynchronize(void);
int cudaStreamIsCapturing(void* stream, int* status);
int cudaStreamBeginCapture(void* stream, int mode);
int cudaStreamEndCapture(void* stream, void** graph);
int cudaGetLastError(void);

/* Calls to this library's own cudaMalloc and cudaFree. */
unsigned long fake_mallocs(void);
unsigned long fake_frees(void);
unsigned long fake_waits(int device);
/* Sets the free bytes reported by cudaMemGetInfo. */
void fake_set_free_bytes(size_t bytes);
/* Simulates another capture. 0: none; 1: on a blocking stream; 2: on a non-blocking stream unknown
 * to the memory saver. */
void fake_set_capture(int capture);
/* A capture unseen by the memory saver. */
int fake_begin_capture(void* stream);
/* Captures broken by a wait. */
unsigned long fake_broken_captures(void);

#ifdef __cplusplus
}
#endif

#endif
