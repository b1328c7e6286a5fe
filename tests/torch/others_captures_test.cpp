// Captures of other threads in global mode, next to every operation of the component.
#include "fixture.hpp"
#include "other_capture.hpp"

#include <memory>
#include <vector>

#include <vmmgraph/torch_elastic.hpp>
#include <vmmgraph/torch_eager.hpp>
#include <vmmgraph/torch_region.hpp>

namespace torch_tests {
namespace {

using vmmgraph::torch::EagerScope;
using vmmgraph::torch::RegionScope;

class OthersCaptures : public Torch {};

TEST_F(OthersCaptures, GoOnBesideOurs) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        auto arena = std::make_unique<SharedVmmAllocator>();
        auto executables = std::make_shared<vmmgraph::torch::ExecutablePool>(*arena);
        executables->set_limits({1, 0});
        const CaptureOptions options = [&] {
            CaptureOptions options{route, Retain::inherit};
            options.executables = executables;
            return options;
        }();
        const Model model(2, 512);
        const auto another = c10::cuda::getStreamFromPool(false);
        const auto input = at::randn({64, 512}, half());
        cudaDeviceSynchronize();
        at::Tensor expected;
        {
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            expected = model(input);
            cudaDeviceSynchronize();
        }
        std::vector<std::pair<at::Tensor, CapturedGraph>> graphs;
        const auto take = [&] {
            at::Tensor output;
            auto graph = capture(*arena, raw(), [&] { output = model(input); }, options);
            graphs.emplace_back(output, std::move(graph));
        };
        const auto replay = [&](void* on) {
            for (auto& [output, graph] : graphs) {
                graph.replay(on);
            }
        };
        const auto replayed = [&] {
            take();
            replay(raw());
        };
        // Torch loads kernels first.
        replayed();
        graphs.clear();
        cudaDeviceSynchronize();
        other::expect_untouched("a capture", take);
        other::expect_untouched("a first replay", [&] { replay(raw()); });
        other::expect_untouched("replays that lend each other what launches them",
                                [&] { replay(raw()); });
        other::expect_untouched("replays on another stream", [&] { replay(another.stream()); });
        other::expect_untouched("an executable ahead of its replay", [&] {
            for (auto& [output, graph] : graphs) {
                static_cast<void>(graph.instantiate());
            }
        });
        other::expect_untouched("what launches it, for good", take,
                                [&] { EXPECT_NE(graphs.back().second.exec(), nullptr); });
        other::expect_untouched("a capture that is given up", [&] {
            vmmgraph::torch::CaptureScope scope(*arena, raw(), options);
            static_cast<void>(input * 2);
        });
        other::expect_untouched("replays that are compared", [&] {
            const auto& output = graphs.front().first;
            const auto difference =
                graphs.front().second.verify(raw(), {{output.mutable_data_ptr(), output.nbytes()}});
            EXPECT_FALSE(difference.found);
        });
        other::expect_untouched("a look at the arena",
                                [&] { EXPECT_GT(arena->stats().spaces, 0U); });
        for (auto& [output, graph] : graphs) {
            graph.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(output, expected));
        }
        other::expect_untouched("a tensor that outlives its graph", replayed, [&] {
            const auto output = graphs.back().first;
            graphs.pop_back();
            static_cast<void>(output);
        });
        other::expect_untouched("the end of graphs", replayed, [&] { graphs.clear(); });
        const auto left_over = [&] {
            replayed();
            graphs.clear();
        };
        other::expect_untouched("a trim", left_over, [&] { arena->trim(); });
        executables.reset();
        other::expect_untouched("an arena that comes and goes", [&] {
            arena = std::make_unique<SharedVmmAllocator>();
            arena.reset();
        });
        arena.reset();
    }
}

TEST_F(OthersCaptures, GoOnBesideEagerWorkOfTheArena) {
    SharedVmmAllocator arena;
    const Model model(2, 512);
    const auto input = at::randn({64, 512}, half());
    at::Tensor kept;
    const auto work = [&] {
        const EagerScope scope(arena, raw());
        kept = model(input).clone();
    };
    work();
    cudaDeviceSynchronize();
    const auto expected = kept.clone();
    cudaDeviceSynchronize();
    other::expect_untouched("eager work", work);
    other::expect_untouched("more of it", work);
    cudaDeviceSynchronize();
    EXPECT_TRUE(at::equal(kept, expected));
    other::expect_untouched("what it kept goes", work, [&] { kept = at::Tensor(); });
}

TEST_F(OthersCaptures, GoOnBesideRegions) {
    auto device = vmmgraph::Device::open();
    for (const auto policy : {vmmgraph::Policy::backup, vmmgraph::Policy::discard}) {
        auto region =
            std::make_unique<vmmgraph::Region>(device, "weights", vmmgraph::RegionOptions{policy});
        at::Tensor weights;
        const auto fill = [&] {
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            const RegionScope scope(*region);
            weights = at::full({static_cast<std::int64_t>(40 * MiB)}, 3, half());
        };
        fill();
        cudaDeviceSynchronize();
        other::expect_untouched("a tensor in a region", fill);
        other::expect_untouched("a region that steps aside and comes back", [&] {
            region->pause();
            region->resume();
        });
        cudaDeviceSynchronize();
        EXPECT_TRUE(policy == vmmgraph::Policy::discard || weights.eq(3).all().item<bool>());
        other::expect_untouched("the end of a tensor in a region", fill,
                                [&] { weights = at::Tensor(); });
        const auto another = [&] {
            region = std::make_unique<vmmgraph::Region>(device, "weights",
                                                        vmmgraph::RegionOptions{policy});
            fill();
            weights = at::Tensor();
        };
        other::expect_untouched("the end of a region", another, [&] { region.reset(); });
    }
}

TEST_F(OthersCaptures, GoOnBesideAKvCache) {
    auto device = vmmgraph::Device::open();
    vmmgraph::torch::KvTensorOptions options{
        {2, vmmgraph::torch::KvPlane{{16, 8, 64}, at::kBFloat16}},
        10'000,
        vmmgraph::KvLayout::by_plane,
        {}};
    options.memory.page_bytes = 2 * MiB;
    std::unique_ptr<vmmgraph::torch::KvTensors> kv;
    const auto make = [&] { kv = std::make_unique<vmmgraph::torch::KvTensors>(device, options); };
    const auto grow = [&] { kv->grow_to(5'000); };
    const auto shrink = [&] { kv->cache().shrink_to(100); };
    const auto end = [&] { kv.reset(); };
    const auto make_and_grow = [&] {
        make();
        grow();
    };
    other::expect_untouched("a cache", end, make);
    other::expect_untouched("a cache that grows for the first time", make, grow);
    other::expect_untouched("a cache that shrinks", grow, shrink);
    other::expect_untouched("a cache that grows again", shrink, grow);
    other::expect_untouched("the end of a cache", make_and_grow, end);
    const auto left_over = [&] {
        make_and_grow();
        end();
    };
    other::expect_untouched("a trim of the device", left_over, [&] { device.trim(); });
}

}  // namespace
}  // namespace torch_tests
