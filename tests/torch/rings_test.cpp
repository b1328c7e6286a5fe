// Rings in captured graphs, on a GPU: streamed and resident units give equal bits.
#include "rings.hpp"

#include <cstdio>
#include <random>
#include <stdexcept>
#include <thread>

namespace torch_tests {
namespace {

vmmgraph_status_t status_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const vmmgraph::Error& error) {
        return error.status();
    }
    return VMMGRAPH_OK;
}

constexpr std::int64_t width = 1024;
constexpr std::uint64_t matrix = width * 3 * width * 2;

at::Tensor layers(Ring& ring, std::size_t count, at::Tensor x, void* stream) {
    for (std::size_t layer = 0; layer < count; ++layer) {
        const UnitScope unit(ring, layer, stream);
        const auto up = numbers_at(unit.address(), 0, {width, 3 * width});
        const auto down = numbers_at(unit.address(), matrix, {3 * width, width});
        x = x + at::mm(at::silu(at::mm(x, up)), down);
        x = x / x.to(at::kFloat).pow(2).mean(-1, true).sqrt().to(at::kBFloat16);
    }
    return x;
}

TEST_F(Rings, StreamedWeightsReadAsResidentOnes) {
    constexpr std::size_t count = 12;
    std::deque<HostBuffer> host;
    for (std::size_t layer = 0; layer < count; ++layer) {
        host.push_back(host_numbers(2 * matrix, 1.0 / 64));
    }
    Ring streamed(*device_, ring_units(count, 2 * matrix, false)),
        resident(*device_, ring_units(count, 2 * matrix, true));
    std::vector<std::size_t> order(count);
    for (std::size_t layer = 0; layer < count; ++layer) {
        order[layer] = layer;
        streamed.set_source(layer, host[layer]);
        resident.set_source(layer, host[layer]);
    }
    SharedVmmAllocator arena;
    std::vector<at::Tensor> inputs, outputs;
    std::vector<CapturedGraph> graphs;
    // With and without copies ahead for the next step.
    for (const auto& [batch, tail] :
         std::vector<std::pair<int, std::size_t>>{{16, 0}, {4, 1}, {1, 3}}) {
        CaptureOptions options;
        options.ring = &streamed;
        options.ring_capture.tail = tail;
        inputs.push_back(at::randn({batch, width}, half()));
        at::Tensor output;
        cudaDeviceSynchronize();
        {
            // Libraries initialize per stream.
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            static_cast<void>(layers(streamed, count, inputs.back(), raw()));
        }
        graphs.push_back(capture(
            arena, raw(), [&] { output = layers(streamed, count, inputs.back(), raw()); },
            options));
        outputs.push_back(std::move(output));
    }
    std::mt19937 random(3);
    const auto before = streamed.stats();
    int wrong = 0, replays = 0, written = 0, swapped = 0, eager = 0;
    for (int step = 0; step < 400; ++step) {
        const auto which = random() % graphs.size();
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        inputs[which].copy_(at::randn_like(inputs[which]));
        switch (random() % 8) {
            case 0:
                fill(host[random() % count], 2 * matrix, 1.0 / 64);
                ++written;
                break;
            case 1: {
                const auto a = random() % count, b = random() % count;
                std::swap(order[a], order[b]);
                for (const auto layer : {a, b}) {
                    streamed.set_source(layer, host[order[layer]]);
                    resident.set_source(layer, host[order[layer]]);
                }
                ++swapped;
                break;
            }
            case 2: {
                const auto found = layers(streamed, count, inputs[which], raw());
                wrong += !at::equal(found, layers(resident, count, inputs[which], raw()));
                ++eager;
                break;
            }
            default:
                break;
        }
        graphs[which].replay(raw());
        ++replays;
        const auto expected = layers(resident, count, inputs[which], raw());
        wrong += !at::equal(outputs[which], expected);
    }
    const auto after = streamed.stats();
    std::printf(
        "RESULT rings, weights: %d replays of 3 graphs over 3 slots of 12, %d eager steps, %d "
        "sources written, %d swapped: %d wrong\n",
        replays, eager, written, swapped, wrong);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(after.launches - before.launches, static_cast<std::uint64_t>(replays));
    EXPECT_EQ(streamed.stats().device_bytes,
              3 * ((2 * matrix + after.page_bytes - 1) / after.page_bytes * after.page_bytes));
    const auto other = c10::cuda::getStreamFromPool(false);
    graphs[0].replay(other.stream());
    cudaDeviceSynchronize();
    EXPECT_TRUE(at::equal(outputs[0], layers(resident, count, inputs[0], raw())));
}

// Granules of 128 tokens: [place][granule][K|V][token][head][dimension].
constexpr std::int64_t places = 4, granules = 8, tokens = 128, heads = 8, dimension = 128;
constexpr std::uint64_t granule = 2 * tokens * heads * dimension * 2;
constexpr std::uint64_t cache_bytes = places * granules * granule;

at::Tensor attend(Ring& ring, std::size_t count, at::Tensor x, const at::Tensor& masked,
                  void* stream) {
    for (std::size_t layer = 0; layer < count; ++layer) {
        const UnitScope unit(ring, layer, stream);
        const auto all =
            numbers_at(unit.address(), 0, {places, granules, 2, tokens, heads, dimension});
        const auto side = [&](std::int64_t which) {
            return all.select(2, which)
                .reshape({places, granules * tokens, heads, dimension})
                .transpose(1, 2);
        };
        const auto scores =
            at::matmul(x, side(0).transpose(-1, -2)).to(at::kFloat).masked_fill(masked, -1e30);
        x = x + at::matmul(at::softmax(scores, -1).to(at::kBFloat16), side(1));
        x = x / x.to(at::kFloat).pow(2).mean(-1, true).add(1e-3).sqrt().to(at::kBFloat16);
    }
    return x;
}

TEST_F(Rings, KeysAndValuesOfSequencesThatJoinGrowAndLeave) {
    constexpr std::size_t count = 8;
    std::vector<std::deque<HostBuffer>> host(count);
    for (auto& layer : host) {
        for (std::int64_t place = 0; place < places; ++place) {
            layer.push_back(host_numbers(granules * granule, 1.0));
        }
    }
    Ring streamed(*device_, ring_units(count, cache_bytes, false), slots(2)),
        resident(*device_, ring_units(count, cache_bytes, true));
    std::vector<std::int64_t> lengths{3, 0, 1, 8};
    std::uint64_t planned = 0;
    const auto set_sources = [&] {
        planned = 0;
        for (std::size_t layer = 0; layer < count; ++layer) {
            std::vector<HostRun> runs;
            for (std::int64_t place = 0; place < places; ++place) {
                const auto bytes = static_cast<std::uint64_t>(lengths[place]) * granule;
                runs.push_back({host[layer][place], 0,
                                static_cast<std::uint64_t>(place) * granules * granule, bytes});
                planned += bytes;
            }
            streamed.set_source(layer, runs);
            resident.set_source(layer, runs);
        }
    };
    set_sources();
    auto query = at::randn({places, heads, 4, dimension}, half());
    auto masked = at::zeros({places, 1, 1, granules * tokens}, half().dtype(at::kBool));
    const auto mask = [&] {
        auto on_host = at::ones({places, 1, 1, granules * tokens}, at::kBool);
        for (std::int64_t place = 0; place < places; ++place) {
            // An empty sequence attends to one token.
            on_host[place]
                .narrow(-1, 0, std::max<std::int64_t>(1, lengths[place] * tokens))
                .fill_(false);
        }
        masked.copy_(on_host);
    };
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.ring = &streamed;
    options.ring_capture.most_runs = places;
    at::Tensor output;
    cudaDeviceSynchronize();
    {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        mask();
        static_cast<void>(attend(streamed, count, query, masked, raw()));
    }
    auto graph = capture(
        arena, raw(), [&] { output = attend(streamed, count, query, masked, raw()); }, options);
    std::mt19937 random(5);
    int wrong = 0, changes = 0;
    std::uint64_t moved = 0, expected_moved = 0;
    const int steps = static_cast<int>(setting("VMMGRAPH_RING_STEPS", 2000));
    for (int step = 0; step < steps; ++step) {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        query.copy_(at::randn_like(query));
        const bool changed = random() % 4 == 0;
        if (changed) {
            auto& length = lengths[random() % places];
            // A sequence leaves, joins, or grows by a granule.
            length = length == 0 ? 1 + static_cast<std::int64_t>(random() % 3)
                     : length == granules || random() % 8 == 0 ? 0
                                                               : length + 1;
            mask();
            set_sources();
            ++changes;
        }
        // An empty place reads stale data; its output is ignored.
        const auto before = streamed.stats().copied_bytes;
        graph.replay(raw());
        moved += streamed.stats().copied_bytes - before;
        // The first layer, copied ahead, is copied again after a change.
        expected_moved += planned + (changed ? planned / count : 0);
        const auto right = attend(resident, count, query, masked, raw());
        for (std::int64_t place = 0; place < places; ++place) {
            wrong += lengths[place] > 0 && !at::equal(output[place], right[place]);
        }
    }
    std::printf(
        "RESULT rings, keys and values: %d steps, %d changes, %.1f GiB moved of %.1f planned: %d "
        "wrong\n",
        steps, changes, static_cast<double>(moved) / (1 << 30),
        static_cast<double>(expected_moved) / (1 << 30), wrong);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(moved, expected_moved);
}

TEST_F(Rings, WhatGoesWrongIsSaidAndTheNextStepIsRight) {
    constexpr std::size_t count = 6;
    std::deque<HostBuffer> host;
    Ring ring(*device_, ring_units(count, 2 * matrix, false)),
        resident(*device_, ring_units(count, 2 * matrix, true));
    for (std::size_t layer = 0; layer < count; ++layer) {
        host.push_back(host_numbers(2 * matrix, 1.0 / 64));
        ring.set_source(layer, host[layer]);
        resident.set_source(layer, host[layer]);
    }
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.ring = &ring;
    const auto input = at::randn({4, width}, half());
    cudaDeviceSynchronize();
    at::Tensor output;
    const auto body = [&](std::size_t some) { output = layers(ring, some, input, raw()); };
    {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        body(count);
    }
    // A body that throws, skips a unit, or reorders units leaves no state.
    EXPECT_THROW(static_cast<void>(capture(
                     arena, raw(),
                     [&] {
                         body(2);
                         throw std::runtime_error("the model");
                     },
                     options)),
                 std::runtime_error);
    EXPECT_EQ(status_of([&] {
                  static_cast<void>(capture(arena, raw(), [&] { body(count - 1); }, options));
              }),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(status_of([&] {
                  static_cast<void>(capture(
                      arena, raw(), [&] { const UnitScope unit(ring, 1, raw()); }, options));
              }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of([&] {
                  vmmgraph::torch::CaptureScope scope(arena, raw(), options);
                  scope.next_piece();
              }),
              VMMGRAPH_ERROR_WRONG_STATE);
    // Another thread's capture of the ring is refused.
    output.reset();
    auto graph = std::make_optional(capture(
        arena, raw(),
        [&] {
            std::thread([&] {
                SharedVmmAllocator other;
                const auto stream = c10::cuda::getStreamFromPool(true);
                EXPECT_EQ(status_of([&] {
                              static_cast<void>(capture(other, stream.stream(), [] {}, options));
                          }),
                          VMMGRAPH_ERROR_WRONG_STATE);
            }).join();
            body(count);
        },
        options));
    const auto right = [&] {
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        graph->replay(raw());
        return at::equal(output, layers(resident, count, input, raw()));
    };
    EXPECT_TRUE(right());
    {
        const UnitScope unit(ring, 0, raw());
        EXPECT_EQ(status_of([&] { graph->replay(raw()); }), VMMGRAPH_ERROR_WRONG_STATE);
    }
    ring.abort();
    EXPECT_TRUE(right());
    graph->replay(raw());
    fill(host[5], 2 * matrix, 1.0 / 64);
    EXPECT_TRUE(right());
    graph.reset();
    output.reset();
    graph.emplace(capture(arena, raw(), [&] { body(count); }, options));
    EXPECT_TRUE(right());
    cudaDeviceSynchronize();
    const auto before = device_->stats().physical_bytes;
    ring = Ring(*device_, ring_units(1, 4096, false), slots(1));
    EXPECT_TRUE(right());
    graph.reset();
    cudaDeviceSynchronize();
    output.reset();
    device_->trim();
    EXPECT_LT(device_->stats().physical_bytes, before);
}

// The store overlaps the next step, which reads the host copy.
TEST_F(Rings, WhatIsMadeOnTheDeviceIsASourceFromTheNextStepOn) {
    constexpr std::size_t count = 6;
    constexpr std::uint64_t bytes = 32 * MiB;
    constexpr std::int64_t numbers = static_cast<std::int64_t>(bytes / 2);
    std::deque<HostBuffer> host;
    Ring ring(*device_, ring_units(count, bytes, false), slots(2));
    std::vector<at::Tensor> expected, found;
    for (std::size_t unit = 0; unit < count; ++unit) {
        expected.push_back(at::randn({numbers}, half()));
        found.push_back(at::empty({numbers}, half()));
        host.emplace_back(*device_, bytes);
        host.back().write(0, expected.back().cpu().data_ptr(), bytes);
        ring.set_source(unit, host.back());
    }
    auto made = at::empty({numbers}, half());
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.ring = &ring;
    cudaDeviceSynchronize();
    auto graph = capture(
        arena, raw(),
        [&] {
            for (std::size_t unit = 0; unit < count; ++unit) {
                const UnitScope scope(ring, unit, raw());
                found[unit].copy_(numbers_at(scope.address(), 0, {numbers}));
            }
        },
        options);
    const auto wrong_now = [&] {
        int wrong = 0;
        for (std::size_t unit = 0; unit < count; ++unit) {
            wrong += !at::equal(found[unit], expected[unit]);
        }
        return wrong;
    };
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    const auto make = [&](std::size_t unit) {
        made.copy_(at::randn_like(made));
        expected[unit].copy_(made);
    };
    std::mt19937 random(9);
    int wrong = 0, stores = 0;
    for (int step = 0; step < 80; ++step) {
        for (auto more = random() % 3; more > 0; --more) {
            const auto unit = random() % count;
            make(unit);
            host[unit].store(0, made.const_data_ptr(), bytes, raw());
            host[unit].before(raw());
            ++stores;
        }
        graph.replay(raw());
        wrong += wrong_now();
    }
    // Control: a copy unknown to the library.
    int control = 0;
    const auto other = c10::cuda::getStreamFromPool();
    for (int step = 0; step < 10; ++step) {
        make(1);
        cudaDeviceSynchronize();
        cudaMemcpyAsync(host[1].data(), made.const_data_ptr(), bytes, cudaMemcpyDeviceToHost,
                        other.stream());
        host[1].changed();
        graph.replay(raw());
        cudaDeviceSynchronize();
        control += wrong_now() > 0;
        host[1].changed();
        graph.replay(raw());
    }
    std::printf(
        "RESULT rings, write-back: 80 replays, %d stores of 32 MiB between them: %d units wrong; "
        "%d of 10 without the library\n",
        stores, wrong, control);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(wrong_now(), 0);
}

}  // namespace
}  // namespace torch_tests
