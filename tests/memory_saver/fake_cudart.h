/* A CUDA runtime of tests: host memory, counted calls, and what goes wrong on demand. Its symbols have a version, as the real ones do. */
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
/* Waits for a device. */
unsigned long fake_waits(int device);
/* What cudaMemGetInfo says is free. */
void fake_set_free_bytes(size_t bytes);
/* 0: no capture; 1: on a stream that the default stream knows of; 2: on a non-blocking one that nobody asks. Besides those that begin. */
void fake_set_capture(int capture);
/* As cudaStreamBeginCapture, for a program that the memory saver does not see. */
int fake_begin_capture(void* stream);
/* Captures that a wait has broken. */
unsigned long fake_broken_captures(void);

#ifdef __cplusplus
}
#endif

#endif
