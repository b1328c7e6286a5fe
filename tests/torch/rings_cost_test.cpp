// Cost of a step with keys and values or weights streamed from the host, on a GPU, compared with
// the link, the work alone, and other methods.
//
// Sizes are those of Qwen3-8B: 36 layers, 4 KiB of keys and values per token and layer, 368 MiB of
// weights per layer. With streamed keys and values all layers read the same weights, which exceed
// the device's caches.
#include "median.hpp"
#include "rings.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

namespace torch_tests {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t hidden = 4096, inner = 12'288, kv_heads = 8, group = 4, head_dimension = 128;
constexpr std::uint64_t token_bytes = 2 * kv_heads * head_dimension * 2;
constexpr std::uint64_t weight_bytes =
    static_cast<std::uint64_t>(hidden) * (6144 + 4096 + 3 * inner) * 2;
constexpr std::uint64_t piece = 64 * MiB;
constexpr double GiB = 1024.0 * MiB;

struct Weights {
    at::Tensor qkv, out, gate, up, down;

    static Weights at(void* address) {
        std::uint64_t skip = 0;
        const auto next = [&](std::int64_t rows, std::int64_t columns) {
            auto made = numbers_at(address, skip, {rows, columns});
            skip += static_cast<std::uint64_t>(rows * columns) * 2;
            return made;
        };
        Weights all;
        all.qkv = next(hidden, 6144), all.out = next(hidden, hidden);
        all.gate = next(hidden, inner), all.up = next(hidden, inner),
        all.down = next(inner, hidden);
        return all;
    }
};

at::Tensor to_unit_scale(const at::Tensor& x) {
    return x / x.to(at::kFloat).pow(2).mean(-1, true).add(1e-3).sqrt().to(at::kBFloat16);
}

at::Tensor feed_forward(const Weights& w, const at::Tensor& x, const at::Tensor& attended) {
    const auto y = to_unit_scale(x + at::mm(attended, w.out));
    return to_unit_scale(y + at::mm(at::silu(at::mm(y, w.gate)) * at::mm(y, w.up), w.down));
}

at::Tensor attend(const Weights& w, const at::Tensor& x, void* address, std::int64_t tokens) {
    const auto query =
        at::mm(x, w.qkv).narrow(-1, 0, hidden).reshape({kv_heads, group, head_dimension});
    const auto keys = numbers_at(address, 0, {kv_heads, tokens, head_dimension});
    const auto values = numbers_at(address, static_cast<std::uint64_t>(tokens) * token_bytes / 2,
                                   {kv_heads, tokens, head_dimension});
    const auto scores =
        at::softmax(at::matmul(query, keys.transpose(-1, -2)).to(at::kFloat) * 0.0884, -1)
            .to(at::kBFloat16);
    return feed_forward(w, x, at::matmul(scores, values).reshape({1, hidden}));
}

class RingCosts : public Rings {
protected:
    void SetUp() override {
        Rings::SetUp();
        c10::cuda::CUDACachingAllocator::emptyCache();
        std::size_t free = 0, total = 0;
        ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
        if (static_cast<double>(free) < 24 * GiB) {
            GTEST_SKIP() << "needs 24 GiB of free memory";
        }
    }

    // Allocates host memory in pieces, which form the units' sources.
    void host(std::size_t pieces) {
        const auto numbers =
            (at::randn({static_cast<std::int64_t>(piece / 2)}, half()) * (1.0 / 64)).cpu();
        while (host_.size() < pieces) {
            host_.emplace_back(*device_, piece);
            host_.back().write(0, numbers.data_ptr(), piece);
        }
    }

    void set_sources(Ring& ring, std::size_t units, std::uint64_t bytes) {
        for (std::size_t unit = 0; unit < units; ++unit) {
            std::vector<HostRun> runs;
            for (std::uint64_t to = 0; to < bytes; to += piece) {
                const auto which =
                    (unit * ((bytes + piece - 1) / piece) + to / piece) % host_.size();
                runs.push_back({host_[which], 0, to, std::min(piece, bytes - to)});
            }
            ring.set_source(unit, runs);
        }
    }

    static void no_sources(Ring& ring, std::size_t units) {
        for (std::size_t unit = 0; unit < units; ++unit) {
            ring.set_source(unit, std::vector<HostRun>{});
        }
    }

    // Milliseconds per step.
    double time(const std::function<void()>& step, int steps = 6) {
        std::vector<double> times;
        step();
        for (int round = 0; round < 5; ++round) {
            cudaDeviceSynchronize();
            const auto start = Clock::now();
            for (int i = 0; i < steps; ++i) {
                step();
            }
            cudaDeviceSynchronize();
            times.push_back(
                std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps);
        }
        return median(times);
    }

    double link(void* to, std::size_t units, std::uint64_t bytes) {
        return time([&] {
            for (std::size_t unit = 0; unit < units; ++unit) {
                for (std::uint64_t done = 0; done < bytes; done += piece) {
                    const auto which =
                        (unit * ((bytes + piece - 1) / piece) + done / piece) % host_.size();
                    cudaMemcpyAsync(static_cast<char*>(to) + done, host_[which].data(),
                                    std::min(piece, bytes - done), cudaMemcpyHostToDevice,
                                    stream_->stream());
                }
            }
        });
    }

    // Host microseconds of alternating calls on an idle device.
    std::vector<double> host_times(const std::vector<std::function<void()>>& calls) {
        std::vector<std::vector<double>> times(calls.size());
        for (int i = 0; i < 60; ++i) {
            for (std::size_t call = 0; call < calls.size(); ++call) {
                cudaDeviceSynchronize();
                const auto start = Clock::now();
                calls[call]();
                times[call].push_back(
                    std::chrono::duration<double, std::micro>(Clock::now() - start).count());
            }
        }
        std::vector<double> medians;
        for (auto& one : times) {
            medians.push_back(median(std::move(one)));
        }
        return medians;
    }

    std::deque<HostBuffer> host_;
};

// A captured step updated by plain CUDA calls, for comparison.
class Bare {
public:
    template <class Body>
    Bare(Ring& ring, at::cuda::CUDAStream stream, const Body& body) : stream_(stream) {
        graph_.capture_begin();
        ring.capture_begin(stream.stream());
        output_ = body();
        const auto step = ring.capture_end(stream.stream());
        graph_.capture_end();
        graph_.instantiate();
        std::size_t count = 0;
        check(cudaGraphGetNodes(graph_.raw_cuda_graph(), nullptr, &count));
        std::vector<cudaGraphNode_t> nodes(count);
        check(cudaGraphGetNodes(graph_.raw_cuda_graph(), nodes.data(), &count));
        for (auto* node : nodes) {
            cudaGraphNodeType type{};
            check(cudaGraphNodeGetType(node, &type));
            cudaMemcpy3DParms copy{};
            if (type == cudaGraphNodeTypeMemcpy &&
                cudaGraphMemcpyNodeGetParams(node, &copy) == cudaSuccess &&
                copy.kind == cudaMemcpyHostToDevice) {
                copies_.emplace_back(node, copy);
            }
        }
    }

    [[nodiscard]] std::size_t copies() const { return copies_.size(); }

    void set(std::uint64_t less) {
        for (const auto& [node, whole] : copies_) {
            auto copy = whole;
            copy.extent.width -= less;
            copy.srcPtr.pitch = copy.dstPtr.pitch = copy.extent.width;
            check(cudaGraphExecMemcpyNodeSetParams(graph_.raw_cuda_graph_exec(), node, &copy));
        }
    }

    void launch() { check(cudaGraphLaunch(graph_.raw_cuda_graph_exec(), stream_.stream())); }

private:
    static void check(cudaError_t code) {
        TORCH_CHECK(code == cudaSuccess, cudaGetErrorString(code));
    }

    at::cuda::CUDAGraph graph_{true};
    at::cuda::CUDAStream stream_;
    at::Tensor output_;
    std::vector<std::pair<cudaGraphNode_t, cudaMemcpy3DParms>> copies_;
};

TEST_F(RingCosts, KeysAndValuesStreamed) {
    constexpr std::size_t layers = 36;
    host(72);
    const at::Tensor packed =
        at::randn({static_cast<std::int64_t>(weight_bytes / 2)}, half()) * (1.0 / 64);
    const auto weights = Weights::at(packed.data_ptr());
    const auto input = to_unit_scale(at::randn({1, hidden}, half()));
    // Tokens and layers per unit. Short units expose the fixed cost per unit.
    for (const auto& [tokens, group_of] :
         std::vector<std::pair<std::int64_t, std::size_t>>{{1024, 1},
                                                           {1024, 4},
                                                           {1024, 6},
                                                           {4096, 1},
                                                           {4096, 2},
                                                           {8192, 1},
                                                           {16'384, 1},
                                                           {32'768, 1}}) {
        const auto layer_bytes = static_cast<std::uint64_t>(tokens) * token_bytes,
                   bytes = layer_bytes * group_of;
        const std::size_t units = layers / group_of;
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        // Two slots suffice for long units and hold as much memory.
        const std::size_t in = group_of >= 6 ? 2 : 3;
        Ring ring(*device_, ring_units(units, bytes, false), slots(in)),
            serial(*device_, ring_units(units, bytes, false), slots(1)),
            resident(*device_, ring_units(units, bytes, true));
        // The former default page size, before pages became as long as a unit.
        RingOptions in_eighths = slots(in);
        in_eighths.page_bytes = 2 * MiB;
        while (in_eighths.page_bytes < 16 * MiB && in_eighths.page_bytes * 16 <= bytes) {
            in_eighths.page_bytes *= 2;
        }
        Ring eighths(*device_, ring_units(units, bytes, false), in_eighths);
        SharedVmmAllocator arena;
        const auto at_layer = [&, of = group_of](const Ring& from, std::size_t layer) {
            return static_cast<char*>(from.address(layer / of)) + layer % of * layer_bytes;
        };
        const auto step = [&, of = group_of](Ring& from,
                                             const std::function<void(std::size_t)>& work) {
            for (std::size_t unit = 0; unit < units; ++unit) {
                const UnitScope scope(from, unit, raw());
                for (std::size_t layer = unit * of; layer < (unit + 1) * of; ++layer) {
                    work(layer);
                }
            }
        };
        const auto body = [&, length = tokens](Ring& from) {
            at::Tensor x = input;
            step(from,
                 [&](std::size_t layer) { x = attend(weights, x, at_layer(from, layer), length); });
            return x;
        };
        std::vector<at::Tensor> outputs;
        const auto captured = [&](Ring& from) {
            set_sources(from, units, bytes);
            static_cast<void>(body(from));
            cudaDeviceSynchronize();
            CaptureOptions options;
            options.ring = &from;
            at::Tensor output;
            auto graph = capture(arena, raw(), [&] { output = body(from); }, options);
            outputs.push_back(std::move(output));
            return graph;
        };
        auto graph = captured(ring), in_line = captured(serial), at_home = captured(resident),
             by_eighths = captured(eighths);
        // One graph per layer, and a host wait after each.
        std::vector<CapturedGraph> each;
        std::vector<at::Tensor> between{input};
        for (std::size_t layer = 0; layer < layers; ++layer) {
            at::Tensor next;
            each.push_back(capture(arena, raw(), [&, length = tokens] {
                next = attend(weights, between.back(), at_layer(ring, layer), length);
            }));
            between.push_back(std::move(next));
        }
        const auto a_layer_at_a_time = [&] {
            step(ring, [&](std::size_t layer) {
                cudaStreamSynchronize(stream_->stream());
                each[layer].replay(raw());
                cudaStreamSynchronize(stream_->stream());
            });
        };
        std::printf("RESULT rings, KV: %zu layers a unit, %zu slots\n", group_of, in);
        const auto all = time([&] { graph.replay(raw()); });
        const auto alone = link(ring.address(0), units, bytes);
        ring.abort();
        const auto serially = time([&] { in_line.replay(raw()); });
        const auto a_layer = time(a_layer_at_a_time);
        const auto eager = time([&] { static_cast<void>(body(ring)); });
        const auto home = time([&] { at_home.replay(raw()); });
        graph.replay(raw());
        at_home.replay(raw());
        by_eighths.replay(raw());
        const bool same = at::equal(outputs[0], outputs[2]) && at::equal(outputs[3], outputs[2]);
        const auto held = ring.stats().device_bytes;
        auto* const exec = static_cast<cudaGraphExec_t>(graph.exec());
        int crossings = 0;
        const auto crossing = [&](Ring& of, CapturedGraph& with) {
            set_sources(of, units, crossings++ / 2 % 2 == 0 ? bytes - 128 * token_bytes : bytes);
            with.replay(raw());
        };
        set_sources(ring, units, bytes);
        auto* const home_exec = static_cast<cudaGraphExec_t>(at_home.exec());
        const auto steady = host_times({[&] { graph.replay(raw()); },
                                        [&] { cudaGraphLaunch(exec, stream_->stream()); },
                                        [&] { at_home.replay(raw()); },
                                        [&] { cudaGraphLaunch(home_exec, stream_->stream()); }});
        std::printf(
            "RESULT rings, KV of %lld tokens x 36: host, no source changing: %.1f us, its launch "
            "alone %.1f; all resident %.1f, %.1f\n",
            static_cast<long long>(tokens), steady[0], steady[1], steady[2], steady[3]);
        Bare bare(ring, *stream_, [&] { return body(ring); });
        int changes = 0;
        const auto host_side = host_times(
            {[&] { graph.replay(raw()); }, [&] { cudaGraphLaunch(exec, stream_->stream()); },
             [&] { at_home.replay(raw()); }, [&] { crossing(ring, graph); },
             [&] { by_eighths.replay(raw()); }, [&] { crossing(eighths, by_eighths); },
             [&] { bare.launch(); },
             [&] {
                 bare.set(changes++ % 2 == 0 ? 128 * token_bytes : 0);
                 bare.launch();
             }});
        no_sources(ring, units);
        const auto work = time([&] { graph.replay(raw()); });
        std::printf(
            "RESULT rings, KV of %lld tokens x 36: %.2f ms, %.1f tokens/s; link alone %.2f (%.1f "
            "GiB/s), work alone %.2f: %.3f of the "
            "larger; all "
            "resident %.2f ms\n",
            static_cast<long long>(tokens), all, 1000 / all, alone,
            static_cast<double>(layer_bytes) * layers / GiB / alone * 1000, work,
            std::max(alone, work) / all, home);
        std::printf(
            "RESULT rings, KV of %lld tokens x 36: one graph, copies in line %.2f ms; a graph a "
            "layer, each waited for %.2f; eager %.2f\n",
            static_cast<long long>(tokens), serially, a_layer, eager);
        std::printf(
            "RESULT rings, KV of %lld tokens x 36: host %.1f us, its launch alone %.1f, all "
            "resident %.1f, a granule crossed in all units "
            "+%.1f, "
            "and +%.1f with pages of %.0f MiB instead of %.0f; "
            "device %.0f MiB of "
            "%.0f; %s\n",
            static_cast<long long>(tokens), host_side[0], host_side[1], host_side[2],
            host_side[3] - host_side[0], host_side[5] - host_side[4],
            static_cast<double>(in_eighths.page_bytes) / MiB,
            static_cast<double>(ring.stats().page_bytes) / MiB, static_cast<double>(held) / MiB,
            static_cast<double>(layer_bytes) * layers / MiB, same ? "bit for bit" : "WRONG");
        std::printf(
            "RESULT rings, KV of %lld tokens x 36: CUDA alone changes %zu copies and launches in "
            "+%.1f us\n",
            static_cast<long long>(tokens), bare.copies(), host_side[7] - host_side[6]);
        EXPECT_TRUE(same);
        EXPECT_GT(std::max(alone, work) / all, 0.8) << "copies and work do not overlap";
        EXPECT_LT(all, serially * 1.02);
        EXPECT_LT(all, a_layer * 1.02);
        cudaDeviceSynchronize();
    }
}

TEST_F(RingCosts, WeightsStreamed) {
    constexpr std::size_t layers = 12;
    host(72);
    for (const std::int64_t batch : {1, 64}) {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        Ring ring(*device_, ring_units(layers, weight_bytes, false)),
            resident(*device_, ring_units(layers, weight_bytes, true));
        SharedVmmAllocator arena;
        const auto input = to_unit_scale(at::randn({batch, hidden}, half()));
        std::vector<at::Tensor> outputs;
        const auto captured = [&](Ring& from) {
            const auto body = [&] {
                at::Tensor x = input;
                for (std::size_t layer = 0; layer < layers; ++layer) {
                    const UnitScope unit(from, layer, raw());
                    const auto weights = Weights::at(unit.address());
                    x = feed_forward(weights, x, at::mm(x, weights.qkv).narrow(-1, 0, hidden));
                }
                return x;
            };
            set_sources(from, layers, weight_bytes);
            static_cast<void>(body());
            cudaDeviceSynchronize();
            CaptureOptions options;
            options.ring = &from;
            at::Tensor output;
            auto graph = capture(arena, raw(), [&] { output = body(); }, options);
            outputs.push_back(std::move(output));
            return graph;
        };
        auto graph = captured(ring), at_home = captured(resident);
        const auto all = time([&] { graph.replay(raw()); }, 3);
        const auto alone = link(ring.address(0), layers, weight_bytes);
        ring.abort();
        graph.replay(raw());
        at_home.replay(raw());
        const bool same = at::equal(outputs[0], outputs[1]);
        const auto home = time([&] { at_home.replay(raw()); });
        std::printf(
            "RESULT rings, weights of 12 layers, batch %lld: %.2f ms, link alone %.2f (%.1f "
            "GiB/s): %.3f of it; all resident %.2f; device "
            "%.0f MiB of "
            "%.0f; %s\n",
            static_cast<long long>(batch), all, alone,
            static_cast<double>(weight_bytes) * layers / GiB / alone * 1000, alone / all, home,
            static_cast<double>(ring.stats().device_bytes) / MiB,
            static_cast<double>(weight_bytes) * layers / MiB, same ? "bit for bit" : "WRONG");
        EXPECT_TRUE(same);
        EXPECT_GT(alone / all, 0.9);
        cudaDeviceSynchronize();
    }
}

}  // namespace
}  // namespace torch_tests
