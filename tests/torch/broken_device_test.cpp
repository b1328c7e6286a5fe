// Teardown after a kernel assertion, when every CUDA call fails.
#include "fixture.hpp"

#include <vmmgraph/torch_eager.hpp>

namespace torch_tests {
namespace {

class BrokenDevice : public Torch {
protected:
    // Threads of CUDA's libraries do not survive a fork.
    void SetUp() override {
        GTEST_FLAG_SET(death_test_style, "threadsafe");
        Torch::SetUp();
    }

    // Captures a graph whose next replay asserts if `index` is out of range.
    Shape indexed(SharedVmmAllocator& arena, const Model& model, const at::Tensor& index,
                  const CaptureOptions& options) const {
        const auto input = at::randn({64, 512}, half());
        cudaDeviceSynchronize();
        at::Tensor output;
        auto graph =
            capture(arena, raw(), [&] { output = at::index(model(input), {index}) * 2; }, options);
        return {input, {}, output, std::move(graph)};
    }

    // Exits with status 0 if all objects are destroyed.
    [[noreturn]] void everything_goes(const CaptureOptions& options) const {
        {
            SharedVmmAllocator arena;
            const Model model(1, 512);
            const auto index = at::zeros({8}, half().dtype(at::kLong));
            const auto other = c10::cuda::getStreamFromPool();
            std::vector<Shape> shapes;
            for (int i = 0; i < 3; ++i) {
                shapes.push_back(indexed(arena, model, index, options));
            }
            at::Tensor kept;
            {
                const vmmgraph::torch::EagerScope scope(arena, raw());
                const c10::cuda::CUDAStreamGuard guard(*stream_);
                kept = model(shapes[0].input);
            }
            for (auto* const stream : {raw(), static_cast<void*>(other.stream())}) {
                for (auto& shape : shapes) {
                    shape.graph.replay(stream);
                }
            }
            kept.record_stream(other);
            if (options.route == Route::blocks) {
                // On the mempool route torch throws when the memory is freed.
                shapes[1].output.record_stream(other);
            }
            cudaDeviceSynchronize();
            index.fill_(std::int64_t{1} << 40);
            cudaDeviceSynchronize();
            shapes[0].graph.replay(other.stream());
            if (cudaDeviceSynchronize() == cudaSuccess) {
                std::_Exit(2);
            }
            const auto refused = [](const auto& work) {
                try {
                    work();
                } catch (const std::exception&) {
                    return true;
                }
                return false;
            };
            if (!refused([&] { shapes[1].graph.replay(raw()); }) ||
                !refused([&] { arena.trim(); })) {
                std::_Exit(3);
            }
            shapes.pop_back();
        }
        std::exit(0);
    }
};

TEST_F(BrokenDevice, EverythingGoesAndTheProcessLives) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        const CaptureOptions options{route, Retain::inherit};
        EXPECT_EXIT(everything_goes(options), testing::ExitedWithCode(0), "");
    }
}

}  // namespace
}  // namespace torch_tests
