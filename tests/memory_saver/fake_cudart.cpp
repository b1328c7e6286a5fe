#include "fake_cudart.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>

namespace {

constexpr int devices = 2;
constexpr std::size_t total = std::size_t{1} << 40;

std::atomic<unsigned long> mallocs{0};
std::atomic<unsigned long> frees{0};
std::array<std::atomic<unsigned long>, devices> waits{};
std::atomic<std::size_t> free_bytes{total};
std::atomic<int> capture{0};
std::atomic<unsigned long> broken{0};
std::mutex mutex;
std::set<void*> live;
// Separate, because a waiting thread holds this mutex during another thread's fork, and the child
// frees memory.
std::mutex captures;
std::set<void*> captured;

thread_local int current = 0;
thread_local int last = 0;

int failed(int code) {
    last = code;
    return code;
}

}  // namespace

extern "C" {

int cudaMalloc(void** ptr, size_t bytes) {
    ++mallocs;
    if (ptr == nullptr) {
        return failed(1);
    }
    *ptr = nullptr;
    if (bytes > total) {
        return failed(2);
    }
    if (bytes > 0) {
        *ptr = std::malloc(bytes);
        const std::lock_guard lock(mutex);
        live.insert(*ptr);
    }
    return 0;
}

int cudaFree(void* ptr) {
    ++frees;
    if (ptr == nullptr) {
        return 0;
    }
    const std::lock_guard lock(mutex);
    if (live.erase(ptr) == 0) {
        return failed(1);
    }
    std::free(ptr);
    return 0;
}

int cudaGetDevice(int* device) {
    *device = current;
    return 0;
}

int cudaSetDevice(int device) {
    if (device < 0 || device >= devices) {
        return failed(101);
    }
    current = device;
    return 0;
}

int cudaMemGetInfo(size_t* free, size_t* all) {
    *free = free_bytes;
    *all = total;
    return 0;
}

int cudaDeviceSynchronize(void) {
    ++waits[static_cast<std::size_t>(current)];
    const std::lock_guard lock(captures);
    if (capture != 0 || !captured.empty()) {
        ++broken;
        return failed(900);
    }
    return 0;
}

int cudaStreamIsCapturing(void* stream, int* status) {
    const std::lock_guard lock(captures);
    *status = captured.count(stream) == 0 ? 0 : 1;
    return capture == 1 ? failed(906) : 0;
}

int cudaStreamBeginCapture(void* stream, int mode) {
    if (stream == nullptr || mode < 0 || mode > 2) {
        return failed(stream == nullptr ? 900 : 1);
    }
    return fake_begin_capture(stream);
}

int cudaStreamEndCapture(void* stream, void** graph) {
    const std::lock_guard lock(captures);
    *graph = nullptr;
    return captured.erase(stream) == 0 ? failed(901) : 0;
}

int fake_begin_capture(void* stream) {
    const std::lock_guard lock(captures);
    return captured.insert(stream).second ? 0 : failed(901);
}

int cudaGetLastError(void) {
    const int code = last;
    last = 0;
    return code;
}

unsigned long fake_mallocs(void) { return mallocs; }
unsigned long fake_frees(void) { return frees; }
unsigned long fake_waits(int device) { return waits[static_cast<std::size_t>(device)]; }
void fake_set_free_bytes(size_t bytes) { free_bytes = bytes; }
void fake_set_capture(int mode) { capture = mode; }
unsigned long fake_broken_captures(void) { return broken; }

}  // extern "C"
