// Graphs with generators other than torch's default. Needs a GPU.
#include "fixture.hpp"

namespace torch_tests {
namespace {

at::Generator generator(std::uint64_t seed) {
    auto made = at::cuda::detail::createCUDAGenerator(0);
    made.set_current_seed(seed);
    return made;
}

CaptureOptions drawing_from(const std::vector<at::Generator>& generators, Route route) {
    CaptureOptions options{route, Retain::inherit};
    for (const auto& one : generators) {
        options.generators.push_back(std::make_shared<at::Generator>(one));
    }
    return options;
}

at::Tensor draw(const std::vector<at::Generator>& generators) {
    std::vector<at::Tensor> numbers{at::rand({1000}, half())};
    for (const auto& one : generators) {
        numbers.push_back(at::rand({1000}, one, half()));
        numbers.push_back(at::randn({999}, one, half()));
    }
    return at::cat(numbers);
}

}  // namespace

TEST_F(Torch, OtherGeneratorsAreNamedToACapture) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const std::vector generators{generator(8), generator(9)};
        at::Tensor first, second;
        const auto options = drawing_from(generators, route);
        auto one = capture(arena, raw(), [&] { first = draw(generators); }, options);
        vmmgraph::torch::CaptureScope scope(arena, raw(), options);
        second = draw(generators);
        scope.next_piece();
        second.add_(draw(generators));
        auto two = scope.end();

        at::manual_seed(7);
        const std::vector same{generator(8), generator(9)};
        std::vector<at::Tensor> eager;
        for (int turn = 0; turn < 3; ++turn) {
            eager.push_back(draw(same));
            const auto before = draw(same);
            eager.push_back(before + draw(same));
        }
        cudaDeviceSynchronize();
        at::manual_seed(7);
        for (auto used : generators) {
            used.set_offset(0);
        }
        for (int turn = 0; turn < 3; ++turn) {
            one.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(first, eager[2 * turn])) << turn;
            two.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(second, eager[2 * turn + 1])) << turn;
        }
        at::manual_seed(7);
        const auto behind = draw(generators);
        at::manual_seed(7);
        EXPECT_TRUE(at::equal(behind, draw(same)));
    }
}

TEST_F(Torch, ANamedGeneratorIsUsableBehindACaptureThatFailed) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const std::vector generators{generator(8)};
        const auto options = drawing_from(generators, route);
        for (int turn = 0; turn < 2; ++turn) {
            EXPECT_THROW(static_cast<void>(capture(
                             arena, raw(),
                             [&] {
                                 static_cast<void>(draw(generators));
                                 // Illegal during capture; invalidates the capture.
                                 EXPECT_NE(cudaStreamSynchronize(stream_->stream()), cudaSuccess);
                                 static_cast<void>(cudaGetLastError());
                             },
                             options)),
                         c10::Error);
            at::manual_seed(7);
            auto used = generators.front();
            used.set_current_seed(8);
            const auto numbers = draw(generators);
            at::manual_seed(7);
            EXPECT_TRUE(at::equal(numbers, draw({generator(8)})));
        }
        at::Tensor numbers;
        auto graph = capture(arena, raw(), [&] { numbers = draw(generators); }, options);
        graph.replay(raw());
        cudaDeviceSynchronize();
        const auto first = numbers.clone();
        graph.replay(raw());
        cudaDeviceSynchronize();
        EXPECT_FALSE(at::equal(first, numbers));
    }
}

}  // namespace torch_tests
