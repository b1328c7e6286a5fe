// Captured work that gets each step's values before its replay: kernel parameters, memory written
// by another stream, events.
#include <array>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <cuda.h>

#include "devices.hpp"

namespace engine_tests {
namespace {

constexpr std::int64_t rows = 100;
constexpr std::int64_t columns = 256;

// scale(float* at, float by, unsigned count): multiplies `count` numbers.
constexpr const char* scale_kernel = R"(
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 at, .param .f32 by, .param .u32 count) {
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %d<5>;
    ld.param.u64 %d1, [at];
    ld.param.f32 %f1, [by];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 ret;
    cvta.to.global.u64 %d2, %d1;
    mul.wide.u32 %d3, %r5, 4;
    add.s64 %d4, %d2, %d3;
    ld.global.f32 %f2, [%d4];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%d4], %f3;
    ret;
}
)";

class Scale {
public:
    Scale() {
        C10_CUDA_CHECK(
            cudaLibraryLoadData(&library_, scale_kernel, nullptr, nullptr, 0, nullptr, nullptr, 0));
        C10_CUDA_CHECK(cudaLibraryGetKernel(&kernel_, library_, "scale"));
        // CUDA loads a kernel at its first launch, which is illegal in a capture.
        call(at::zeros({1}, on_device(at::kFloat)), 1);
        wait();
    }
    Scale(const Scale&) = delete;
    Scale& operator=(const Scale&) = delete;
    ~Scale() { C10_CUDA_IGNORE_ERROR(cudaLibraryUnload(library_)); }

    void call(const at::Tensor& numbers, float by) const {
        Arguments arguments{numbers.data_ptr<float>(), by, static_cast<unsigned>(numbers.numel())};
        auto pointers = arguments.pointers();
        C10_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel_),
                                        dim3(arguments.blocks()), dim3(threads), pointers.data(), 0,
                                        c10::cuda::getCurrentCUDAStream().stream()));
    }

    // The driver function accepts kernels of any origin.
    void set(void* exec, void* node, const at::Tensor& numbers, float by) const {
        using Set = CUresult (*)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*);
        static const auto set_params = [] {
            void* found = nullptr;
            C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
                "cuGraphExecKernelNodeSetParams", &found, 12000, cudaEnableDefault, nullptr));
            return reinterpret_cast<Set>(found);
        }();
        Arguments arguments{numbers.data_ptr<float>(), by, static_cast<unsigned>(numbers.numel())};
        auto pointers = arguments.pointers();
        CUDA_KERNEL_NODE_PARAMS params{};
        params.kern = reinterpret_cast<CUkernel>(kernel_);
        params.gridDimX = arguments.blocks();
        params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
        params.blockDimX = threads;
        params.kernelParams = pointers.data();
        TORCH_CHECK(set_params(static_cast<CUgraphExec>(exec), static_cast<CUgraphNode>(node),
                               &params) == CUDA_SUCCESS);
    }

private:
    struct Arguments {
        float* at;
        float by;
        unsigned count;
        std::array<void*, 3> pointers() { return {&at, &by, &count}; }
        unsigned blocks() const { return (count + threads - 1) / threads; }
    };
    static constexpr unsigned threads = 256;
    cudaLibrary_t library_ = nullptr;
    cudaKernel_t kernel_ = nullptr;
};

// Milliseconds of GPU work with result zero.
at::Tensor slow(int times) {
    static const auto* const zeros = new at::Tensor(at::zeros({2048, 2048}, on_device(at::kFloat)));
    auto product = *zeros;
    for (int i = 0; i < times; ++i) {
        product = at::mm(product, *zeros);
    }
    return product;
}

struct Model {
    at::Tensor table = at::randint(1, 100, {rows, columns}, on_device(at::kFloat));
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::unique_ptr<GraphInputs> inputs;
    std::unique_ptr<GraphExecutor> executor;
    std::vector<std::pair<at::Tensor, at::Tensor>> outputs_and_expected;

    explicit Model(ExecutorOptions options,
                   const std::function<void(Recorder&, const at::Tensor&)>& work) {
        for (const auto tokens : {2U, 4U, 8U, 16U}) {
            options.full.push_back(Key::of(tokens));
        }
        vmmgraph::torch::install();
        static_cast<void>(slow(1));
        arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
        const auto tokens = Extent::along(Axis::tokens);
        inputs = std::make_unique<GraphInputs>(
            std::vector<Input>{
                Input::host(names::tokens, at::kLong, {tokens}),
                Input::output(names::hidden_states, at::kFloat, {tokens, Extent::fixed(columns)})},
            options.full, InputsOptions{device(), 512});
        wait();
        executor = std::make_unique<GraphExecutor>(
            arena, *inputs,
            [this, work](Recorder& recorder) {
                const auto& out = inputs->hidden_states();
                out.copy_(table.index_select(0, inputs->tokens()));
                work(recorder, out);
            },
            options);
    }

    // Does not wait.
    template <class Expected>
    void step(std::int64_t tokens, float number, Expected&& expected) {
        const auto ids = at::randint(0, rows, {tokens}, at::kLong);
        const Step step{Key::of(static_cast<std::uint32_t>(tokens)), Phase::decode, true, &number};
        const auto ran = executor->run(
            step, {{names::tokens, ids}}, [] { FAIL() << "no step of these is eager"; }, stream());
        EXPECT_EQ(ran.mode, Mode::full);
        const c10::cuda::CUDAStreamGuard guard(
            c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream()), 0));
        outputs_and_expected.emplace_back(inputs->hidden_states(tokens).clone(),
                                          expected(table.index_select(0, ids.to(table.device()))));
    }

    // Counts outputs with any wrong bit.
    int wrong() {
        wait();
        int count = 0;
        for (const auto& [output, expected] : outputs_and_expected) {
            count += at::equal(output, expected) ? 0 : 1;
        }
        outputs_and_expected.clear();
        return count;
    }
};

TEST(Update, ParametersOfKernelsAreThoseOfTheStep) {
    NEEDS_A_GPU();
    const Scale scale;
    for (const bool told : {true, false}) {
        struct Call {
            void* node;
            at::Tensor numbers;
        };
        std::map<std::uint32_t, Call> calls;
        ExecutorOptions options;
        options.executables.max_graphs = 2;
        if (told) {
            options.update = [&](const Key& bucket, const Step& step,
                                 vmmgraph::torch::CapturedGraph* graph) {
                const auto& call = calls.at(bucket[Axis::tokens]);
                scale.set(graph->exec(), call.node, call.numbers,
                          *static_cast<const float*>(step.params));
            };
        }
        Model model(options, [&](Recorder& recorder, const at::Tensor& out) {
            scale.call(out, 1);
            calls[recorder.bucket()[Axis::tokens]] = {recorder.last_kernel(), out};
        });
        EXPECT_EQ(model.executor->warm_up(), 4u);
        std::mt19937 random(1);
        for (int i = 0; i < 300; ++i) {
            const auto by = static_cast<float>(2 + random() % 50);
            model.step(1 + random() % 16, by, [by](const at::Tensor& of) { return of * by; });
        }
        EXPECT_EQ(model.wrong(), told ? 0 : 300);
    }
}

TEST(Update, KernelsOfEveryPieceAreTold) {
    NEEDS_A_GPU();
    const Scale scale;
    vmmgraph::torch::install();
    vmmgraph::SharedVmmAllocator arena(0);
    auto numbers = at::ones({1000}, on_device(at::kFloat));
    wait();
    std::vector<void*> nodes;
    vmmgraph::torch::CaptureScope scope(arena, stream());
    scale.call(numbers, 1);
    nodes.push_back(scope.last_kernel());
    scope.next_piece();
    scale.call(numbers, 1);
    nodes.push_back(scope.last_kernel());
    auto graph = scope.end();
    EXPECT_NE(refusal([&] { static_cast<void>(graph.exec(2)); }), "");
    EXPECT_EQ(graph.exec(1), graph.exec());
    double expected = 1;
    for (int i = 1; i < 8; ++i) {
        scale.set(graph.exec(0), nodes[0], numbers, static_cast<float>(i));
        scale.set(graph.exec(1), nodes[1], numbers, 2);
        graph.replay(stream(), [&](std::size_t) { numbers.add_(1); });
        expected = (expected * i + 1) * 2;
    }
    wait();
    EXPECT_TRUE(at::equal(numbers, at::full_like(numbers, expected)));
}

TEST(Update, OnlyAKernelThatWasJustGivenIsOne) {
    NEEDS_A_GPU();
    vmmgraph::torch::install();
    vmmgraph::SharedVmmAllocator arena(0);
    const auto refused = [&](const std::function<void(vmmgraph::torch::CaptureScope&)>& before) {
        vmmgraph::torch::CaptureScope scope(arena, stream());
        before(scope);
        try {
            static_cast<void>(scope.last_kernel());
            return false;
        } catch (const vmmgraph::Error& error) {
            return error.status() == VMMGRAPH_ERROR_WRONG_STATE;
        }
    };
    const auto numbers = at::ones({64}, on_device(at::kFloat));
    auto other = at::zeros({64}, on_device(at::kFloat));
    wait();
    EXPECT_TRUE(refused([](auto&) {})) << "nothing";
    EXPECT_TRUE(refused([&](auto&) { other.copy_(numbers); })) << "a copy";
    EXPECT_FALSE(refused([&](auto&) { other.add_(numbers); }));
    EXPECT_TRUE(refused([&](auto& scope) {
        other.add_(numbers);
        static_cast<void>(scope.end());
    })) << "after the end";
    auto graph = vmmgraph::torch::capture(arena, stream(), [&] { other.add_(numbers); });
    graph.replay(stream());
    wait();
    EXPECT_TRUE(at::equal(other, numbers));
}

// Between the previous replay and this one.
TEST(Update, AnotherStreamsWorkIsJoined) {
    NEEDS_A_GPU();
    const auto updating = c10::cuda::getStreamFromPool(false, 0);
    for (const bool joined : {true, false}) {
        auto weight = at::zeros({1}, on_device(at::kFloat));
        ExecutorOptions options;
        options.update_stream = joined ? updating.stream() : nullptr;
        options.update = [&](const Key&, const Step& step, vmmgraph::torch::CapturedGraph*) {
            EXPECT_EQ(c10::cuda::getCurrentCUDAStream().stream() == updating.stream(), joined);
            const c10::cuda::CUDAStreamGuard guard(updating);
            weight.copy_(slow(30).sum().reshape({1}) + *static_cast<const float*>(step.params));
        };
        Model model(options,
                    [&](Recorder&, const at::Tensor& out) { out.add_(slow(3).sum() + weight); });
        EXPECT_EQ(model.executor->warm_up(), 4u);
        for (int i = 0; i < 30; ++i) {
            const auto number = static_cast<float>(1 + i);
            model.step(1 + i % 16, number, [number](const at::Tensor& of) { return of + number; });
        }
        const int wrong = model.wrong();
        if (joined) {
            EXPECT_EQ(wrong, 0);
        } else {
            EXPECT_GT(wrong, 0) << "this test would not see a stream that is not joined";
        }
    }
}

// The previous replay may still read the memory.
TEST(Update, AnUpdateOnItsStreamWaitsForTheGraphsLastReplay) {
    NEEDS_A_GPU();
    const auto updating = c10::cuda::getStreamFromPool(false, 0);
    auto weight = at::zeros({1}, on_device(at::kFloat));
    ExecutorOptions options;
    options.update_stream = updating.stream();
    options.update = [&](const Key&, const Step& step, vmmgraph::torch::CapturedGraph*) {
        weight.fill_(*static_cast<const float*>(step.params));
    };
    Model model(options,
                [&](Recorder&, const at::Tensor& out) { out.add_(slow(30).sum() + weight); });
    EXPECT_EQ(model.executor->warm_up(), 4u);
    const auto ids = at::randint(0, rows, {16}, at::kLong);
    const auto read = model.table.index_select(0, ids.to(model.table.device()));
    wait();
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream()), 0));
    for (int i = 0; i < 20; ++i) {
        // Each update is called during a replay.
        const auto number = static_cast<float>(1 + i);
        const Step step{Key::of(16), Phase::decode, true, &number};
        model.executor->run(
            step, {{names::tokens, ids}}, [] { FAIL() << "no step of these is eager"; }, stream());
        model.outputs_and_expected.emplace_back(model.inputs->hidden_states(16).clone(),
                                                read + number);
    }
    EXPECT_EQ(model.wrong(), 0);
}

// As on Ascend: a running graph waits for its update stream.
TEST(Update, AGraphMayWaitForEventsFromOutside) {
    NEEDS_A_GPU();
    const auto updating = c10::cuda::getStreamFromPool(false, 0);
    cudaEvent_t ready = nullptr;
    cudaEvent_t read = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&read, cudaEventDisableTiming));
    {
        auto weight = at::zeros({1}, on_device(at::kFloat));
        ExecutorOptions options;
        options.executables.max_graphs = 1;
        options.update = [&](const Key&, const Step& step, vmmgraph::torch::CapturedGraph*) {
            const c10::cuda::CUDAStreamGuard guard(updating);
            C10_CUDA_CHECK(cudaStreamWaitEvent(updating.stream(), read, 0));
            weight.copy_(slow(10).sum().reshape({1}) + *static_cast<const float*>(step.params));
            C10_CUDA_CHECK(cudaEventRecord(ready, updating.stream()));
        };
        Model model(options, [&](Recorder&, const at::Tensor& out) {
            auto* const capturing = c10::cuda::getCurrentCUDAStream().stream();
            out.add_(slow(3).sum());
            C10_CUDA_CHECK(cudaStreamWaitEvent(capturing, ready, cudaEventWaitExternal));
            out.add_(weight);
            C10_CUDA_CHECK(cudaEventRecordWithFlags(read, capturing, cudaEventRecordExternal));
        });
        EXPECT_EQ(model.executor->warm_up(), 4u);
        for (int i = 0; i < 60; ++i) {
            const auto number = static_cast<float>(1 + i);
            model.step(1 + (i * 5) % 16, number,
                       [number](const at::Tensor& of) { return of + number; });
        }
        EXPECT_EQ(model.wrong(), 0);
        EXPECT_GT(model.executor->executables().evictions, 0u) << "graphs were instantiated again";
    }
    C10_CUDA_CHECK(cudaEventDestroy(ready));
    C10_CUDA_CHECK(cudaEventDestroy(read));
}

TEST(Update, ThatThrowsLeavesTheGraphAsItWas) {
    NEEDS_A_GPU();
    const auto updating = c10::cuda::getStreamFromPool(false, 0);
    for (const bool own_stream : {false, true}) {
        auto weight = at::zeros({1}, on_device(at::kFloat));
        bool trouble = false;
        ExecutorOptions options;
        options.update_stream = own_stream ? updating.stream() : nullptr;
        options.update = [&](const Key&, const Step& step, vmmgraph::torch::CapturedGraph*) {
            weight.copy_(slow(10).sum().reshape({1}) + *static_cast<const float*>(step.params));
            if (trouble) {
                throw std::runtime_error("no update");
            }
        };
        Model model(options, [&](Recorder&, const at::Tensor& out) { out.add_(weight); });
        for (int i = 0; i < 6; ++i) {
            const auto number = static_cast<float>(1 + i);
            const auto plus = [number](const at::Tensor& of) { return of + number; };
            trouble = i % 2 == 1;
            if (trouble) {
                EXPECT_THROW(model.step(4, number, plus), std::runtime_error);
            } else {
                model.step(4, number, plus);
            }
        }
        EXPECT_EQ(model.wrong(), 0);
        EXPECT_EQ(model.executor->stats().graphs, 1u);
    }
}

}  // namespace
}  // namespace engine_tests
