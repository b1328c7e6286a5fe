// CUDA driver functions of the benchmark, loaded at run time: no CUDA toolkit library is linked.

#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace shootout {

#define SHOOTOUT_DRIVER_FUNCTIONS(X)          \
    X(Init, cuInit)                           \
    X(GetErrorString, cuGetErrorString)       \
    X(DeviceGetName, cuDeviceGetName)         \
    X(CtxSynchronize, cuCtxSynchronize)       \
    X(MemGetInfo, cuMemGetInfo_v2)            \
    X(EventCreate, cuEventCreate)             \
    X(EventRecord, cuEventRecord)             \
    X(EventSynchronize, cuEventSynchronize)   \
    X(EventDestroy, cuEventDestroy_v2)        \
    X(MemAddressReserve, cuMemAddressReserve) \
    X(MemAddressFree, cuMemAddressFree)       \
    X(MemCreate, cuMemCreate)                 \
    X(MemRelease, cuMemRelease)               \
    X(MemMap, cuMemMap)                       \
    X(MemUnmap, cuMemUnmap)                   \
    X(MemSetAccess, cuMemSetAccess)

class Driver {
public:
#define SHOOTOUT_DECLARE(name, symbol) decltype(&::symbol) name = nullptr;
    SHOOTOUT_DRIVER_FUNCTIONS(SHOOTOUT_DECLARE)
#undef SHOOTOUT_DECLARE
    // The symbol of cuEventElapsedTime differs between header releases; its first version is
    // stable.
    CUresult (*EventElapsedTime)(float*, CUevent, CUevent) = nullptr;

    static const Driver& get() {
        static const Driver driver;
        return driver;
    }

    void check(CUresult result, const char* what) const {
        if (result != CUDA_SUCCESS) {
            const char* text = nullptr;
            GetErrorString(result, &text);
            throw std::runtime_error(std::string(what) + ": " +
                                     (text != nullptr ? text : "unknown CUDA error"));
        }
    }

    [[nodiscard]] std::uint64_t free_bytes() const {
        std::size_t free = 0;
        std::size_t total = 0;
        check(MemGetInfo(&free, &total), "cuMemGetInfo");
        return free;
    }

    [[nodiscard]] std::uint64_t total_bytes() const {
        std::size_t free = 0;
        std::size_t total = 0;
        check(MemGetInfo(&free, &total), "cuMemGetInfo");
        return total;
    }

    void synchronize() const { check(CtxSynchronize(), "cuCtxSynchronize"); }

private:
    Driver() {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (library == nullptr) {
            throw std::runtime_error(dlerror());
        }
#define SHOOTOUT_FIND(name, symbol) find(library, name, #symbol);
        SHOOTOUT_DRIVER_FUNCTIONS(SHOOTOUT_FIND)
#undef SHOOTOUT_FIND
        find(library, EventElapsedTime, "cuEventElapsedTime");
        check(Init(0), "cuInit");
    }

    template <class Function>
    static void find(void* library, Function& function, const char* symbol) {
        function = reinterpret_cast<Function>(dlsym(library, symbol));
        if (function == nullptr) {
            throw std::runtime_error(std::string("libcuda.so.1 has no ") + symbol);
        }
    }
};

// GPU time between two points of a stream, in milliseconds.
class Stopwatch {
public:
    Stopwatch() {
        driver_.check(driver_.EventCreate(&start_, CU_EVENT_DEFAULT), "cuEventCreate");
        driver_.check(driver_.EventCreate(&stop_, CU_EVENT_DEFAULT), "cuEventCreate");
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;
    ~Stopwatch() {
        driver_.EventDestroy(start_);
        driver_.EventDestroy(stop_);
    }
    void start(CUstream stream) {
        driver_.check(driver_.EventRecord(start_, stream), "cuEventRecord");
    }
    void stop(CUstream stream) {
        driver_.check(driver_.EventRecord(stop_, stream), "cuEventRecord");
    }
    [[nodiscard]] double milliseconds() const {
        float elapsed = 0;
        driver_.check(driver_.EventSynchronize(stop_), "cuEventSynchronize");
        driver_.check(driver_.EventElapsedTime(&elapsed, start_, stop_), "cuEventElapsedTime");
        return elapsed;
    }

private:
    const Driver& driver_ = Driver::get();
    CUevent start_ = nullptr;
    CUevent stop_ = nullptr;
};

}  // namespace shootout
