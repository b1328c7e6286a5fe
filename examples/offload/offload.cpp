// Decodes with keys and values, or weights, in host memory, with one graph per step, and compares
// with the same decoder fully on the device. Then answers a prompt in chunks through the same ring.
//
//   offload [--streams kv|weights] [--context TOKENS] [--prompt TOKENS] [--chunk TOKENS]
//           [--layers N] [--slots N] [--steps N]
//
// Without --streams: keys and values of two contexts, and weights. Prints the theoretical optimum
// first. Exit status 1 if a token or a value of a hidden state differs, or if the moved bytes
// differ from the plan; 77 without a GPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "decoder.hpp"

namespace {

using offload_example::Contents;
using offload_example::Decoder;
using offload_example::Shape;
using offload_example::Streams;
using Clock = std::chrono::steady_clock;

constexpr double mib = 1 << 20;

struct Settings {
    std::optional<Streams> streams;
    std::int64_t context = 0;
    std::int64_t prompt = 16384;
    std::int64_t chunk = 2048;
    std::int64_t layers = 36;
    std::int64_t slots = 3;
    std::int64_t steps = 40;
};

struct Decoded {
    std::vector<std::int64_t> tokens;
    std::vector<at::Tensor> hidden;
    double seconds = 0;
};

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.at(values.size() / 2);
}

Decoded decode(Decoder& decoder, std::int64_t steps) {
    Decoded all;
    std::vector<double> seconds;
    std::int64_t token = 1;
    for (std::int64_t step = 0; step < steps; ++step) {
        const auto start = Clock::now();
        auto made = decoder.step(token);
        seconds.push_back(seconds_since(start));
        token = made.token;
        all.tokens.push_back(token);
        all.hidden.push_back(std::move(made.hidden));
    }
    all.seconds = median(std::move(seconds));
    return all;
}

// Returns GiB per second from pinned host memory.
double measure_link(const vmmgraph::Device& device) {
    constexpr std::uint64_t bytes = 256 << 20;
    const vmmgraph::HostBuffer from(device, bytes);
    const auto into = at::empty({static_cast<std::int64_t>(bytes)},
                                at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    std::vector<double> seconds;
    for (int round = 0; round < 9; ++round) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto start = Clock::now();
        C10_CUDA_CHECK(
            cudaMemcpy(into.mutable_data_ptr(), from.data(), bytes, cudaMemcpyHostToDevice));
        seconds.push_back(seconds_since(start));
    }
    return static_cast<double>(bytes) / (1 << 30) / median(std::move(seconds));
}

std::size_t compare(const vmmgraph::Device& device, const Settings& settings, Streams streams,
                    std::int64_t context, double link) {
    Shape shape;
    shape.layers = settings.layers;
    shape.context = context;
    shape.capacity = context + (settings.steps / Shape::granule + 2) * Shape::granule;
    at::manual_seed(5);
    Contents contents(device, shape, streams);
    const bool weights = streams == Streams::weights;
    std::printf("\n%s of %lld layers stream, %lld tokens of context, %.0f MiB a layer\n",
                weights ? "weights" : "keys and values", static_cast<long long>(shape.layers),
                static_cast<long long>(context), static_cast<double>(contents.unit_bytes()) / mib);

    Decoded wanted;
    std::uint64_t all_bytes = 0;
    {
        Decoder resident(contents, true, {});
        wanted = decode(resident, settings.steps);
        all_bytes = resident.device_bytes();
    }
    std::printf("all resident: %.2f ms a step, %.1f tokens/s\n", wanted.seconds * 1e3,
                1 / wanted.seconds);

    vmmgraph::RingDemand demand;
    demand.units = std::vector<vmmgraph::RingUnit>(
        contents.host.size(),
        {weights ? contents.unit_bytes()
                 : 2 * static_cast<std::uint64_t>(context) * shape.row_bytes()});
    demand.slots = static_cast<std::size_t>(settings.slots);
    demand.link_gib_per_second = link;
    demand.compute_seconds = wanted.seconds;
    std::printf("%s", vmmgraph::ring_ceiling_text(demand).c_str());

    vmmgraph::RingOptions options;
    options.slots = demand.slots;
    Decoder streamed(contents, false, options);
    const auto got = decode(streamed, settings.steps);
    std::size_t wrong = 0;
    for (std::size_t step = 0; step < wanted.tokens.size(); ++step) {
        wrong += got.tokens[step] != wanted.tokens[step];
        wrong += !at::equal(got.hidden[step], wanted.hidden[step]);
    }
    const auto moved = streamed.moved_bytes();
    const auto planned = streamed.planned_bytes();
    const auto best = std::max(
        static_cast<double>(planned) / static_cast<double>(settings.steps) / link / (1 << 30),
        wanted.seconds);
    std::printf(
        "streamed: %.2f ms a step, %.1f tokens/s, %.3f of the best; %.0f MiB on the device instead "
        "of %.0f; %llu steps by a graph, inputs "
        "of %llu by a kernel\n",
        got.seconds * 1e3, 1 / got.seconds, best / got.seconds,
        static_cast<double>(streamed.device_bytes()) / mib, static_cast<double>(all_bytes) / mib,
        static_cast<unsigned long long>(streamed.graph_steps()),
        static_cast<unsigned long long>(streamed.inputs_by_kernel()));
    std::printf("%.1f MiB moved, %.1f planned; %zu tokens and hidden states, %zu differ\n",
                static_cast<double>(moved) / mib, static_cast<double>(planned) / mib,
                wanted.tokens.size(), wrong);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return wrong + (moved != planned ? 1 : 0);
}

// Output of a decoder for a prompt and several steps, and the seconds of a warm run.
struct Answered {
    Decoded steps;
    at::Tensor hidden;
    double seconds = 0;
};

Answered answer(Decoder& decoder, const std::vector<std::int64_t>& prompt, std::int64_t chunk) {
    Answered answered;
    for (int time = 0; time < 2; ++time) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto start = Clock::now();
        auto made = decoder.prefill(prompt, chunk);
        answered.seconds = seconds_since(start);
        answered.hidden = std::move(made.hidden);
        answered.steps.tokens.assign(1, made.token);
    }
    for (int step = 0; step < 10; ++step) {
        auto made = decoder.step(answered.steps.tokens.back());
        answered.steps.tokens.push_back(made.token);
        answered.steps.hidden.push_back(std::move(made.hidden));
    }
    return answered;
}

// Returns the number of wrong tokens and hidden states after a prompt. `work`: seconds of the
// prompt without copies, measured by the decoder with resident weights.
std::size_t compare_prompt(const vmmgraph::Device& device, const Settings& settings,
                           Streams streams, double link, double& work) {
    Shape shape;
    shape.layers = settings.layers;
    shape.context = settings.prompt / Shape::granule * Shape::granule;
    shape.capacity = shape.context + 2 * Shape::granule;
    at::manual_seed(6);
    Contents contents(device, shape, streams);
    const bool weights = streams == Streams::weights;
    std::vector<std::int64_t> prompt(static_cast<std::size_t>(settings.prompt));
    for (std::size_t at = 0; at < prompt.size(); ++at) {
        prompt[at] = static_cast<std::int64_t>(at * at) % shape.vocabulary;
    }
    Answered wanted;
    {
        Decoder resident(contents, true, {});
        wanted = answer(resident, prompt, settings.chunk);
    }
    if (weights) {
        work = wanted.seconds;
    } else {
        // The second decoder must compute its own contents.
        const auto nothing =
            at::zeros({static_cast<std::int64_t>(contents.unit_bytes())}, at::kByte);
        for (auto& buffer : contents.host) {
            buffer.write(0, nothing.const_data_ptr(), buffer.bytes());
        }
    }
    vmmgraph::RingOptions options;
    options.slots = static_cast<std::size_t>(settings.slots);
    Decoder streamed(contents, false, options);
    const auto got = answer(streamed, prompt, settings.chunk);
    std::size_t wrong = at::equal(got.hidden, wanted.hidden) ? 0 : 1;
    for (std::size_t step = 0; step < wanted.steps.tokens.size(); ++step) {
        wrong += got.steps.tokens[step] != wanted.steps.tokens[step];
    }
    for (std::size_t step = 0; step < wanted.steps.hidden.size(); ++step) {
        wrong += !at::equal(got.steps.hidden[step], wanted.steps.hidden[step]);
    }
    std::uint64_t bytes = 0;
    for (std::int64_t from = 0; from < settings.prompt; from += settings.chunk) {
        const auto of_layer = weights ? shape.weight_bytes()
                                      : 2 * static_cast<std::uint64_t>(from) * shape.row_bytes();
        bytes += of_layer * static_cast<std::uint64_t>(shape.layers);
    }
    const auto copies = static_cast<double>(bytes) / link / (1 << 30);
    const auto moved = streamed.moved_bytes(), planned = streamed.planned_bytes();
    std::printf(
        "\nprompt of %lld tokens, %lld at a time, %s stream: %.1f ms, %.0f tokens/s; %.2f GiB by "
        "the link alone %.1f ms",
        static_cast<long long>(settings.prompt), static_cast<long long>(settings.chunk),
        weights ? "weights" : "keys and values", got.seconds * 1e3,
        static_cast<double>(settings.prompt) / got.seconds, static_cast<double>(bytes) / (1 << 30),
        copies * 1e3);
    if (work > 0) {
        std::printf(", nothing to copy %.1f: %.3f of the best", work * 1e3,
                    std::max(work, copies) / got.seconds);
    }
    std::printf(
        "\n%.1f MiB moved, %.1f planned; %zu tokens and hidden states behind it, %zu differ\n",
        static_cast<double>(moved) / mib, static_cast<double>(planned) / mib,
        wanted.steps.tokens.size(), wrong);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return wrong + (moved != planned ? 1 : 0);
}

int run(const Settings& settings) {
    vmmgraph::torch::install();
    auto device = vmmgraph::Device::open();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    const auto link = measure_link(device);
    std::printf("link: %.1f GiB/s from pinned host memory\n", link);
    std::size_t wrong = 0;
    const auto one = [&](Streams streams, std::int64_t otherwise) {
        wrong += compare(device, settings, streams,
                         settings.context > 0 ? settings.context : otherwise, link);
    };
    if (settings.streams != Streams::weights) {
        one(Streams::keys_and_values, 4096);
        if (settings.context == 0) {
            one(Streams::keys_and_values, 32768);
        }
    }
    if (settings.streams != Streams::keys_and_values) {
        one(Streams::weights, 1024);
    }
    double work = 0;
    for (const auto streams : {Streams::weights, Streams::keys_and_values}) {
        if (settings.prompt > 0 && settings.streams.value_or(streams) == streams) {
            wrong += compare_prompt(device, settings, streams, link, work);
        }
    }
    std::printf("\n%zu wrong or lost\n", wrong);
    return wrong == 0 ? 0 : 1;
}

bool read(int count, char** arguments, Settings& settings) {
    for (int i = 1; i + 1 < count; i += 2) {
        const std::string name = arguments[i], text = arguments[i + 1];
        const auto number = std::strtoll(text.c_str(), nullptr, 10);
        if (name == "--streams" && (text == "kv" || text == "weights")) {
            settings.streams = text == "kv" ? Streams::keys_and_values : Streams::weights;
        } else if (name == "--context" && number > 0) {
            settings.context = number;
        } else if (name == "--prompt" && number >= 0) {
            settings.prompt = number;
        } else if (name == "--chunk" && number > 0) {
            settings.chunk = number;
        } else if (name == "--layers" && number > 0) {
            settings.layers = number;
        } else if (name == "--slots" && number > 0) {
            settings.slots = number;
        } else if (name == "--steps" && number > 0) {
            settings.steps = number;
        } else {
            return false;
        }
    }
    return count % 2 == 1;
}

}  // namespace

int main(int count, char** arguments) {
    Settings settings;
    if (!read(count, arguments, settings)) {
        std::fprintf(stderr,
                     "offload [--streams kv|weights] [--context TOKENS] [--prompt TOKENS] [--chunk "
                     "TOKENS] [--layers N] [--slots N] [--steps N]\n");
        return 2;
    }
    try {
        if (c10::cuda::device_count() == 0) {
            std::printf("SKIPPED: needs a GPU\n");
            return 77;
        }
        return run(settings);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
