// Context of a scenario: a way to capture, and the report.
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

// Destroying an unfinished capture abandons it.
class Capture {
public:
    virtual ~Capture() = default;
    virtual GraphPtr end() = 0;
};

class Way {
public:
    virtual ~Way() = default;
    // If false, Run runs the bodies on the CPU.
    virtual bool captures() const { return true; }
    // Sets up torch, and undoes it.
    virtual void install() {}
    virtual void uninstall() {}
    // `generators`: in addition to torch's default.
    virtual std::unique_ptr<Capture> begin(const Stream& stream,
                                           const std::vector<at::Generator>& generators) = 0;
    GraphPtr capture(const Stream& stream, const Body& body,
                     const std::vector<at::Generator>& generators = {});
    virtual std::size_t mapped() { return 0; }
    virtual std::size_t held() { return 0; }
};

// "stock": torch's own, one private pool per graph. "blocks", "mempool": one arena. "eager",
// "again": graphs rerun their bodies on the CPU. Null for other names.
std::unique_ptr<Way> make_way(const std::string& name);
// Also used by the probe.
std::unique_ptr<Way> make_stock();

class Run {
public:
    Run(Way& way, Report& report);

    Report& report;
    Way& way;

    bool on_gpu() const { return stream_.has_value(); }
    at::Device device() const { return on_gpu() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU); }
    // Not the default stream.
    const Stream& stream() const { return *stream_; }
    static Stream side(int n);

    GraphPtr capture(const Body& body) { return capture_on(stream_, body); }
    GraphPtr capture(const Stream& stream, const Body& body) { return capture_on(stream, body); }
    // Runs outside captures and waits: libraries initialize.
    void eagerly(const Body& body);
    void replay(const GraphPtr& graph);

    // From -4 to 4: sums are exact in any order.
    at::Tensor ints(at::IntArrayRef sizes, at::ScalarType type = at::kFloat,
                    std::uint64_t seed = 1) const;
    at::Tensor reals(at::IntArrayRef sizes, at::ScalarType type = at::kFloat,
                     std::uint64_t seed = 1) const;
    at::TensorOptions options(at::ScalarType type = at::kFloat) const {
        return at::TensorOptions().dtype(type).device(device());
    }

    void note(const std::string& key, const std::string& value) { report.note(key, value); }
    void note(const std::string& key, std::int64_t value) {
        report.note(key, std::to_string(value));
    }
    // Type, sizes and a hash of all bytes.
    void note(const std::string& key, const at::Tensor& tensor);
    void check(const std::string& key, bool right) { report.check(key, right); }
    bool attempt(const std::string& key, const Body& body) { return report.attempt(key, body); }
    // Notes the tensor or the exception.
    void tried(const std::string& key, const std::function<at::Tensor()>& make);

    // `body` is deterministic. Replays with `inputs`, then with negated or flipped ones. Results
    // must equal eager results, bit for bit if `exact`.
    void operation(const std::string& key, const std::vector<at::Tensor>& inputs,
                   const std::function<std::vector<at::Tensor>()>& body, bool exact = true);

private:
    GraphPtr capture_on(const std::optional<Stream>& stream, const Body& body);

    std::optional<Stream> stream_;
};

struct Entry {
    std::string name;
    std::function<void(Run&)> body;
    // Installs the way itself.
    bool early = false;
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

// Checks torch and the way after the scenario.
struct Before {
    std::int64_t allocated = 0;
    std::int64_t reserved = 0;
};
Before before();
// Torch's peak and the arena's current size.
void note_memory(Run& run);
void probe(Run& run, const Before& start);

inline double setting(const char* name, double otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr || *text == '\0' ? otherwise : std::strtod(text, nullptr);
}

// On another thread. Rethrows exceptions.
void elsewhere(const Body& body);

class Event {
public:
    Event() { C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
    void record(const Stream& stream) const {
        C10_CUDA_CHECK(cudaEventRecord(event_, stream.stream()));
    }
    void hold_back(const Stream& stream) const {
        C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event_, 0));
    }
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

// Ordered between earlier and later work of `main`.
void forked(const Stream& main, const Stream& side, const Body& body);

// Milliseconds of work on the current stream.
void busy(double milliseconds);

}  // namespace differential
