#include "run.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <sstream>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>

namespace differential {
namespace {

class Rerun final : public Graph {
public:
    explicit Rerun(Body body) : body_(std::move(body)) {}
    void replay(const Stream&) override { body_(); }
    void replay() { body_(); }

private:
    Body body_;
};

std::string hashed(const at::Tensor& tensor) {
    std::uint64_t hash = 14695981039346656037u;
    const auto bytes = at::empty({static_cast<std::int64_t>(tensor.nbytes())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    const auto* const data = bytes.const_data_ptr<std::uint8_t>();
    for (std::int64_t i = 0; i < bytes.numel(); ++i) {
        hash = (hash ^ data[i]) * 1099511628211u;
    }
    std::ostringstream text;
    text << std::hex << hash;
    return text.str();
}

}  // namespace

Run::Run(Way& way, Report& report) : report(report), way(way) {
    if (way.captures()) {
        stream_ = c10::cuda::getStreamFromPool(true);
        static_cast<void>(side(0));
    }
}

Stream Run::side(int n) {
    // Created once, because pool streams repeat.
    static const std::vector<Stream> sides{c10::cuda::getStreamFromPool(),
                                           c10::cuda::getStreamFromPool(),
                                           c10::cuda::getStreamFromPool()};
    return sides.at(static_cast<std::size_t>(n));
}

GraphPtr Run::capture_on(const std::optional<Stream>& stream, const Body& body) {
    if (!stream) {
        body();
        return std::make_unique<Rerun>(body);
    }
    return way.capture(*stream, body);
}

void Run::eagerly(const Body& body) {
    if (on_gpu()) {
        // The default stream writes the inputs.
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const c10::cuda::CUDAStreamGuard guard(stream());
        body();
        C10_CUDA_CHECK(cudaDeviceSynchronize());
    } else {
        body();
    }
}

void Run::replay(const GraphPtr& graph) {
    if (on_gpu()) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        graph->replay(stream());
        C10_CUDA_CHECK(cudaDeviceSynchronize());
    } else {
        static_cast<Rerun&>(*graph).replay();
    }
}

at::Tensor Run::ints(at::IntArrayRef sizes, at::ScalarType type, std::uint64_t seed) const {
    return at::randint(-4, 5, sizes, at::detail::createCPUGenerator(seed),
                       at::TensorOptions().dtype(at::kLong))
        .to(type)
        .to(device());
}

at::Tensor Run::reals(at::IntArrayRef sizes, at::ScalarType type, std::uint64_t seed) const {
    const auto numbers = at::rand(sizes, at::detail::createCPUGenerator(seed),
                                  at::TensorOptions().dtype(at::kDouble));
    return (numbers * 2 - 1).to(type).to(device());
}

void Run::note(const std::string& key, const at::Tensor& tensor) {
    if (!tensor.defined()) {
        return note(key, "undefined");
    }
    if (on_gpu()) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
    }
    const auto host = tensor.detach().cpu().contiguous();
    std::ostringstream text;
    text << host.scalar_type() << host.sizes() << ' ' << hashed(host) << " from";
    for (std::int64_t i = 0; i < std::min<std::int64_t>(host.numel(), 3) && !host.is_complex();
         ++i) {
        text << ' ' << host.view(-1)[i].toType(at::kDouble).item<double>();
    }
    note(key, text.str());
}

void Run::tried(const std::string& key, const std::function<at::Tensor()>& make) {
    at::Tensor made;
    try {
        made = make();
    } catch (...) {
        return note(key, describe_exception());
    }
    // Device errors surface late.
    std::string said;
    try {
        note(key, made);
    } catch (...) {
        note(key, describe_exception());
    }
}

void Run::operation(const std::string& key, const std::vector<at::Tensor>& inputs,
                    const std::function<std::vector<at::Tensor>()>& body, bool exact) {
    std::vector<at::Tensor> expected, outputs;
    eagerly([&] { expected = body(); });
    const auto graph = capture([&] { outputs = body(); });
    for (int turn = 0; turn < 2; ++turn) {
        if (turn > 0) {
            eagerly([&] {
                for (const auto& input : inputs) {
                    // Keeps indices in range.
                    input.copy_(input.is_floating_point() || input.is_complex() ? input.neg()
                                                                                : input.flip(-1));
                }
                expected = body();
            });
        }
        replay(graph);
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const auto name =
                key + ", replay " + std::to_string(turn) + ", output " + std::to_string(i);
            check(name + " is eager's", exact ? at::equal(outputs[i], expected[i])
                                              : at::allclose(outputs[i], expected[i], 1e-2, 1e-2));
            if (exact) {
                note(name, outputs[i]);
            }
        }
    }
}

void elsewhere(const Body& body) {
    std::exception_ptr thrown;
    std::thread([&] {
        try {
            body();
        } catch (...) {
            thrown = std::current_exception();
        }
    }).join();
    if (thrown) {
        std::rethrow_exception(thrown);
    }
}

void forked(const Stream& main, const Stream& side, const Body& body) {
    const Event fork, join;
    fork.record(main);
    fork.hold_back(side);
    {
        const c10::cuda::CUDAStreamGuard guard(side);
        body();
    }
    join.record(side);
    join.hold_back(main);
}

void busy(double milliseconds) {
    const auto wait = [](void* time) {
        const std::unique_ptr<double> owned(static_cast<double*>(time));
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(*owned));
    };
    C10_CUDA_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream().stream(), wait,
                                      new double(milliseconds)));
}

}  // namespace differential
