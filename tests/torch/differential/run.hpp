// What a scenario is given: a way of capturing, and a report of what came of it.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "harness.hpp"

namespace at::cuda {
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace differential {

using Stream = c10::cuda::CUDAStream;
using Body = std::function<void()>;

inline constexpr std::int64_t MiB = std::int64_t{1} << 20;

class Graph {
public:
    virtual ~Graph() = default;
    virtual void replay(const Stream& stream) = 0;
};
using GraphPtr = std::unique_ptr<Graph>;

// One under way. Destroyed without an end it is abandoned.
class Capture {
public:
    virtual ~Capture() = default;
    virtual GraphPtr end() = 0;
};

class Way {
public:
    virtual ~Way() = default;
    // Where it does not, Run runs the bodies itself, on the CPU.
    virtual bool captures() const { return true; }
    // What it does to torch before the first capture, and takes back.
    virtual void install() {}
    virtual void uninstall() {}
    // `generators` are those that the body draws from, beside torch's default one.
    virtual std::unique_ptr<Capture> begin(const Stream& stream, const std::vector<at::Generator>& generators) = 0;
    GraphPtr capture(const Stream& stream, const Body& body, const std::vector<at::Generator>& generators = {});
    // Bytes of physical memory of an arena.
    virtual std::size_t mapped() { return 0; }
    // The same, after a trim.
    virtual std::size_t held() { return 0; }
};

// "stock": torch's own, with a private pool for each graph. "blocks" and "mempool": ours, one arena. "eager" and "again": graphs that run
// their bodies again, on a CPU. Null for another name.
std::unique_ptr<Way> make_way(const std::string& name);
// "stock" is used by the probe too.
std::unique_ptr<Way> make_stock();

class Run {
public:
    Run(Way& way, Report& report);

    Report& report;
    Way& way;

    bool on_gpu() const { return stream_.has_value(); }
    at::Device device() const { return on_gpu() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU); }
    // Not the default one. Side streams are others.
    const Stream& stream() const { return *stream_; }
    static Stream side(int n);

    GraphPtr capture(const Body& body) { return capture_on(stream_, body); }
    GraphPtr capture(const Stream& stream, const Body& body) { return capture_on(stream, body); }
    // Runs it on the capture stream, outside captures, and waits: what libraries set up at their first use is set up then.
    void eagerly(const Body& body);
    // On the capture stream, and waits.
    void replay(const GraphPtr& graph);

    // Whole numbers from -4 to 4, so that sums are exact in any order; the same for the same seed.
    at::Tensor ints(at::IntArrayRef sizes, at::ScalarType type = at::kFloat, std::uint64_t seed = 1) const;
    // Between -1 and 1.
    at::Tensor reals(at::IntArrayRef sizes, at::ScalarType type = at::kFloat, std::uint64_t seed = 1) const;
    at::TensorOptions options(at::ScalarType type = at::kFloat) const { return at::TensorOptions().dtype(type).device(device()); }

    void note(const std::string& key, const std::string& value) { report.note(key, value); }
    void note(const std::string& key, std::int64_t value) { report.note(key, std::to_string(value)); }
    // Type, sizes and a hash of all bytes, after everything that the device was given.
    void note(const std::string& key, const at::Tensor& tensor);
    void check(const std::string& key, bool right) { report.check(key, right); }
    bool attempt(const std::string& key, const Body& body) { return report.attempt(key, body); }
    // Notes the tensor, or what was thrown on the way to it.
    void tried(const std::string& key, const std::function<at::Tensor()>& make);

    // `body` computes its outputs from `inputs`, in the same way at any time. Captures it, replays it, and once more with other inputs
    // (minus themselves, or the other way round); each replay must give what eager gives, to the bit if `exact`.
    void operation(const std::string& key, const std::vector<at::Tensor>& inputs, const std::function<std::vector<at::Tensor>()>& body,
                   bool exact = true);

private:
    GraphPtr capture_on(const std::optional<Stream>& stream, const Body& body);

    std::optional<Stream> stream_;
};

struct Entry {
    std::string name;
    std::function<void(Run&)> body;
    // It installs the way itself, after what it does before that.
    bool early = false;
    // It runs on a CPU too.
    bool anywhere = false;
    bool alone = false;
    bool ends_badly = false;
};

std::vector<Entry> storage_scenarios();
std::vector<Entry> lifetime_scenarios();
std::vector<Entry> allocator_scenarios();
std::vector<Entry> stream_scenarios();
std::vector<Entry> thread_scenarios();
std::vector<Entry> operator_scenarios();
std::vector<Entry> library_scenarios();
std::vector<Entry> autograd_scenarios();
std::vector<Entry> random_scenarios();
std::vector<Entry> failure_scenarios();

// What a program does after the scenario: whether torch and the way go on, and what memory is left.
struct Before {
    std::int64_t allocated = 0;
    std::int64_t reserved = 0;
};
Before before();
// Physical bytes: torch's at most since resetPeakStats(), and the arena's now.
void note_memory(Run& run);
void probe(Run& run, const Before& start);

// A number from the environment.
inline double setting(const char* name, double otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr || *text == '\0' ? otherwise : std::strtod(text, nullptr);
}

// A thread that runs `body` and is done. What it throws arrives here.
void elsewhere(const Body& body);

// Without times.
class Event {
public:
    Event() { C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
    void record(const Stream& stream) const { C10_CUDA_CHECK(cudaEventRecord(event_, stream.stream())); }
    void hold_back(const Stream& stream) const { C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event_, 0)); }
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

// Runs `body` on `side`, behind what `main` was given and before what it is given next.
void forked(const Stream& main, const Stream& side, const Body& body);

// Milliseconds of work on the current stream.
void busy(double milliseconds);

}  // namespace differential
