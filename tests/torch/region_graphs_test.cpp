// Captures inside a region scope, and graphs over memory paused between or during replays, on a
// GPU.
//
// `VMMGRAPH_REGION_CYCLES` sets the cycles (default 200; with fewer, memory is not checked).
#include "regions.hpp"

#include <malloc.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

namespace torch_tests {
namespace {

using namespace std::chrono_literals;

// MiB in use on the device and in this process.
struct Held {
    double device = 0;
    double host = 0;

    static Held now() {
        std::size_t free = 0, total = 0;
        C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
        malloc_trim(0);
        long pages = 0, resident = 0;
        std::ifstream("/proc/self/statm") >> pages >> resident;
        return {static_cast<double>(total - free) / MiB,
                static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / MiB};
    }
};

// Torch keeps the random seed and the product's workspace on the device.
TEST_F(Regions, CapturesInsideAScopeAreTheArenas) {
    Region region(*device_, "scratch");
    SharedVmmAllocator arena(0);
    const auto a = at::randn({512, 512}, half());
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    cudaDeviceSynchronize();
    at::Tensor inside, product, random;
    std::optional<CapturedGraph> graph;
    {
        const RegionScope scope(region);
        inside = at::ones({1000}, whole());
        // Its workspace, in the region, must not become the graph's.
        static_cast<void>(at::mm(a, a));
        graph.emplace(capture(arena, raw(), [&] {
            product = at::mm(at::mm(a, a), a);
            random = at::rand({1000}, a.options().dtype(at::kFloat));
        }));
        EXPECT_EQ(region.stats().blocks, 1U) << "the capture has something in the region";
        static_cast<void>(at::mm(a, a));
    }
    EXPECT_EQ(region.stats().blocks, 1U) << "torch keeps something in the region";
    const auto expected = at::mm(at::mm(a, a), a);
    region.pause(fence());
    for (int i = 0; i < 3; ++i) {
        graph->replay(raw());
        const auto first = random.clone();
        EXPECT_TRUE(at::equal(product, expected));
        graph->replay(raw());
        EXPECT_FALSE(at::equal(random, first));
        // The workspace of eager products is not paused.
        EXPECT_TRUE(at::equal(at::mm(at::mm(a, a), a), expected));
    }
    cudaDeviceSynchronize();
    region.resume();
}

// Weights are restored, the cache is rebuilt, and the arena is paused, too.
TEST_F(Regions, GraphsOverThemSurviveHundredsOfCyclesBitForBit) {
    const long cycles = setting("VMMGRAPH_REGION_CYCLES", 200);
    Region weights(*device_, "weights", {Policy::backup});
    Region kv(*device_, "kv");
    std::optional<Model> model;
    at::Tensor cache;
    const auto make_cache = [&] {
        cache.copy_(at::arange(cache.numel(), cache.options()).remainder_(17).view_as(cache));
    };
    {
        const RegionScope scope(weights);
        model.emplace();
    }
    {
        const RegionScope scope(kv);
        cache = at::empty({64, 2048}, half());
    }
    make_cache();
    vmmgraph::ArenaOptions arena_options;
    arena_options.tag = "graphs";
    SharedVmmAllocator arena(*device_, arena_options);
    std::vector<Shape> shapes;
    cudaDeviceSynchronize();
    for (const int batch : {1, 7, 16, 64}) {
        auto input = at::randn({batch, 2048}, half());
        at::Tensor output;
        cudaDeviceSynchronize();
        auto graph =
            capture(arena, raw(), [&] { output = (*model)(input + cache.narrow(0, 0, batch)); });
        graph.replay(raw());
        cudaDeviceSynchronize();
        shapes.push_back({input, output.clone(), output, std::move(graph)});
    }
    std::mt19937 random(13);
    int wrong = 0;
    Held before{};
    std::uint64_t host_before = 0;
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    for (long cycle = 0; cycle < cycles; ++cycle) {
        if (cycle == cycles / 4) {
            cudaDeviceSynchronize();
            device_->trim();
            before = Held::now();
            host_before = vmmgraph::host_stats(*device_).held_bytes;
        }
        const auto pick = random() % 8;
        std::vector<std::string> tags;
        for (const auto& [tag, bit] : {std::pair{"weights", 1U}, {"kv", 2U}, {"graphs", 4U}}) {
            if ((pick & bit) != 0) {
                tags.emplace_back(tag);
            }
        }
        bool kept = true;
        if (!tags.empty()) {
            for (auto& shape : shapes) {
                shape.graph.replay(raw());
            }
            EXPECT_EQ(vmmgraph::pause(*device_, tags, fence()).regions, tags.size());
            if ((pick & 4U) != 0) {
                EXPECT_EQ(arena.mapped_size(), 0U);
                EXPECT_THROW(shapes[0].graph.replay(raw()), vmmgraph::Error);
            }
            // Overwrites the same pages.
            Region other(*device_, "other");
            void* const block = other.allocate(128 * MiB, raw());
            ASSERT_EQ(cudaMemsetAsync(block, 0xff, 128 * MiB, stream_->stream()), cudaSuccess);
            other.free(block);
        }
        if (random() % 2 == 0) {
            std::reverse(tags.begin(), tags.end());
        }
        for (const auto& tag : tags) {
            vmmgraph::resume(*device_, {tag}, 1s);
        }
        // Outputs keep the last replays' results.
        for (auto& shape : shapes) {
            kept &= same(shape);
        }
        EXPECT_TRUE(kept) << cycle;
        if ((pick & 2U) != 0) {
            make_cache();
        }
        for (auto& shape : shapes) {
            shape.output.zero_();
            shape.graph.replay(raw());
            wrong += !same(shape);
        }
    }
    cudaDeviceSynchronize();
    device_->trim();
    const auto after = Held::now();
    EXPECT_EQ(wrong, 0);
    std::printf(
        "RESULT regions: %ld cycles, %d wrong, %.1f MiB of the device and %.1f MiB resident more\n",
        cycles, wrong, after.device - before.device, after.host - before.host);
    if (cycles >= 200) {
        EXPECT_EQ(vmmgraph::host_stats(*device_).held_bytes, host_before);
        EXPECT_LE(after.device - before.device, 4);
        EXPECT_LE(after.host - before.host, 16);
    }
}

// Executables use no page; the arena's cuBLAS workspace is torch's memory.
TEST_F(Regions, WhatStaysOfEverythingThatIsPausedIsExecutables) {
    std::vector<at::Tensor> inputs;
    for (const int batch : {1, 7, 16, 64}) {
        inputs.push_back(at::randn({batch, 2048}, half()));
    }
    {
        // First use: the driver, cuBLAS and torch keep memory.
        Model model(1);
        SharedVmmAllocator warm(*device_);
        auto shapes = this->shapes(warm, model, {1, 64}, {}, true);
        wrong(shapes);
    }
    const auto used = [this] {
        cudaDeviceSynchronize();
        device_->trim();
        c10::cuda::CUDACachingAllocator::emptyCache();
        return Held::now().device;
    };
    const double before = used();
    Region weights(*device_, "weights", {Policy::backup});
    SharedVmmAllocator arena(*device_);
    std::optional<Model> model;
    {
        const RegionScope scope(weights);
        model.emplace(6);
    }
    cudaDeviceSynchronize();
    std::vector<CapturedGraph> graphs;
    std::vector<at::Tensor> outputs;
    double executables = 0;
    for (const auto& input : inputs) {
        graphs.push_back(capture(arena, raw(), [&] { outputs.push_back((*model)(input)); }));
        graphs.back().replay(raw());
        executables += static_cast<double>(graphs.back().executable_bytes()) / MiB;
    }
    std::vector<at::Tensor> expected;
    cudaDeviceSynchronize();
    for (const auto& output : outputs) {
        expected.push_back(output.cpu());
    }
    const double resident = used();
    vmmgraph::pause(*device_, {}, fence());
    const double paused = used();
    std::printf(
        "RESULT everything paused: %.1f MiB of the device more than before, of %.1f; executables "
        "take %.1f\n",
        paused - before, resident - before, executables);
    constexpr double workspace = 32;
    EXPECT_LE(paused - before, executables + workspace + 2);
    vmmgraph::resume(*device_, {}, 1s);
    for (std::size_t i = 0; i < graphs.size(); ++i) {
        EXPECT_TRUE(at::equal(outputs[i].cpu(), expected[i]));
        graphs[i].replay(raw());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(outputs[i].cpu(), expected[i]));
    }
}

// Replays of one arena would wait for each other.
TEST_F(Regions, APauseWaitsForReplaysOnThreeStreams) {
    Region weights(*device_, "weights", {Policy::backup});
    std::optional<Model> model;
    {
        const RegionScope scope(weights);
        model.emplace(8);
    }
    std::vector<SharedVmmAllocator> arenas;
    arenas.reserve(3);
    std::vector<Shape> shapes;
    PauseFence three;
    for (int i = 0; i < 3; ++i) {
        stream_ = c10::cuda::getStreamFromPool();
        three.streams.push_back(raw());
        arenas.emplace_back(0);
        auto made = this->shapes(arenas.back(), *model, {8 << i});
        shapes.push_back(std::move(made.front()));
    }
    for (int round = 0; round < 10; ++round) {
        for (int replay = 0; replay < 20; ++replay) {
            for (std::size_t i = 0; i < shapes.size(); ++i) {
                shapes[i].graph.replay(three.streams[i]);
            }
        }
        const auto gone = vmmgraph::pause(*device_, {"weights"}, three);
        EXPECT_GT(gone.copied_bytes, 0U);
        for (void* const stream : three.streams) {
            EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(stream)), cudaSuccess)
                << "it was unmapped under a replay";
        }
        vmmgraph::resume(*device_, {"weights"}, 1s);
        for (const auto& shape : shapes) {
            EXPECT_TRUE(same(shape)) << round;
        }
    }
}

}  // namespace
}  // namespace torch_tests
