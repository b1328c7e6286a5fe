// Library operators: cuBLAS, cuDNN, cuFFT, cuSOLVER and attention kernels. Eager runs first create
// plans and handles.
#include "run.hpp"

#include <ATen/Context.h>

namespace differential {
namespace {

using Tensors = std::vector<at::Tensor>;

void products(Run& run, at::ScalarType type) {
    const auto a = run.ints({6, 96, 128}, type), b = run.ints({6, 128, 64}, type, 2),
               bias = run.ints({64}, type, 3);
    const auto wide = run.ints({512, 1024}, type, 4), tall = run.ints({1024, 256}, type, 5),
               vector = run.ints({1024}, type, 6);
    const auto at_right = run.ints({6, 96, 64}, type, 7);
    run.operation("products", {a, b, bias, wide}, [&] {
        return Tensors{at::bmm(a, b),
                       at::addmm(bias, a[0], b[0]),
                       at::baddbmm(at_right, a, b, 1, 2),
                       at::mm(wide, tall),
                       at::mv(wide, vector),
                       at::linear(a[1], b[1].t().contiguous(), bias),
                       at::matmul(a, b[2]),
                       at::einsum("bij,bjk->ik", {a, b})};
    });
    // Shapes split along the inner dimension.
    const auto flat = run.ints({16, 8192}, type, 8), deep = run.ints({8192, 32}, type, 9);
    run.operation("split", {flat, deep},
                  [&] { return Tensors{at::mm(flat, deep), at::mm(flat, flat.t())}; });
}

void products_of_float(Run& run) { products(run, at::kFloat); }
void products_of_bfloat16(Run& run) { products(run, at::kBFloat16); }
void products_of_double(Run& run) { products(run, at::kDouble); }

void many_shapes_of_products(Run& run) {
    const auto weights = run.ints({1024, 1024}, at::kBFloat16, 2);
    std::vector<GraphPtr> graphs;
    std::vector<at::Tensor> inputs, outputs(12);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        inputs.push_back(run.ints({std::int64_t{1} << i, 1024}, at::kBFloat16, i));
        graphs.push_back(
            run.capture([&, i] { outputs[i] = at::relu(at::mm(inputs[i], weights)); }));
    }
    int wrong = 0;
    for (int n = 0; n < 48; ++n) {
        const auto i = static_cast<std::size_t>(n * 7 % 12);
        run.replay(graphs[i]);
        wrong += !at::equal(outputs[i], at::relu(at::mm(inputs[i], weights)));
        if (n < 12) {
            run.note("shape " + std::to_string(i), outputs[i]);
        }
    }
    run.check("all are right", wrong == 0);
}

void convolutions(Run& run) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
        const auto x = run.ints({4, 16, 32, 32}, type), w = run.ints({32, 16, 3, 3}, type, 2),
                   bias = run.ints({32}, type, 3);
        const auto deep = run.ints({16, 1, 3, 3}, type, 4), up = run.ints({16, 8, 2, 2}, type, 5);
        const std::string name = at::toString(type);
        run.operation(name, {x, w}, [&] {
            return Tensors{at::conv2d(x, w, bias, 1, 1), at::conv2d(x, w, {}, 2),
                           at::conv2d(x, deep, {}, 1, 1, 1, 16), at::conv_transpose2d(x, up, {}, 2),
                           at::conv1d(x.select(2, 0), w.select(3, 0).contiguous(), bias)};
        });
    }
    const auto x = run.ints({4, 16, 32, 32});
    run.operation("pools and norms", {x}, [&] {
        return Tensors{at::max_pool2d(x, 2), at::avg_pool2d(x, 2),
                       at::adaptive_avg_pool2d(x, {1, 1}),
                       at::upsample_nearest2d(x, {64, 64}, std::nullopt, std::nullopt)};
    });
    // Needs cuDNN's heuristics.
    run.operation(
        "batch norm", {x},
        [&] {
            const auto one = at::ones({16}, run.options()), zero = at::zeros({16}, run.options());
            return Tensors{
                at::batch_norm(x, one, zero, zero.clone(), one.clone(), true, 0.1, 1e-5, true),
                at::group_norm(x, 4)};
        },
        false);
}

void transforms(Run& run) {
    const auto x = run.reals({8, 1024}), plane = run.reals({64, 96}, at::kFloat, 2);
    run.operation(
        "fft", {x, plane},
        [&] {
            const auto spectrum = at::fft_rfft(x);
            return Tensors{at::view_as_real(spectrum), at::fft_irfft(spectrum, 1024),
                           at::view_as_real(at::fft_fft2(plane)),
                           at::view_as_real(at::fft_fft(at::complex(x, x * 2), 1000))};
        },
        false);
}

// Restricts torch's attention kernels.
class Attention {
public:
    explicit Attention(const std::string& only) {
        set(only == "flash", only == "efficient", only == "math", only == "cudnn");
    }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;
    ~Attention() { set(true, true, true, true); }

private:
    static void set(bool flash, bool efficient, bool math, bool cudnn) {
        auto& context = at::globalContext();
        context.setSDPUseFlash(flash);
        context.setSDPUseMemEfficient(efficient);
        context.setSDPUseMath(math);
        context.setSDPUseCuDNN(cudnn);
    }
};

void attention(Run& run, const std::string& kernel) {
    const Attention only(kernel);
    const auto type = kernel == "math" ? at::kFloat : at::kBFloat16;
    const auto q = run.reals({2, 4, 128, 64}, type), k = run.reals({2, 4, 256, 64}, type, 2),
               v = run.reals({2, 4, 256, 64}, type, 3);
    run.operation(kernel, {q, k, v}, [&] {
        return Tensors{at::scaled_dot_product_attention(q, k, v),
                       at::scaled_dot_product_attention(q, q, v.slice(2, 0, 128), {}, 0.0, true)};
    });
}

void attention_by_math(Run& run) { attention(run, "math"); }
void attention_by_flash(Run& run) { attention(run, "flash"); }
void attention_by_the_efficient_kernel(Run& run) { attention(run, "efficient"); }
// Missing in some builds, where it throws.
void attention_by_cudnn(Run& run) {
    run.attempt("by cuDNN", [&] { attention(run, "cudnn"); });
}

// Uncapturable solvers must fail alike in all ways.
void solver(Run& run, const std::string& name) {
    const auto random = run.reals({4, 32, 32}, at::kDouble);
    const auto positive =
        at::bmm(random, random.transpose(1, 2)) + at::eye(32, run.options(at::kDouble)) * 32;
    const auto right = run.reals({4, 32, 3}, at::kDouble, 2);
    const auto body = [&]() -> Tensors {
        if (name == "cholesky") {
            return {std::get<0>(at::linalg_cholesky_ex(positive)),
                    std::get<0>(at::linalg_cholesky_ex(positive[0])),
                    at::cholesky_solve(right, at::tril(positive))};
        }
        if (name == "triangular") {
            return {at::linalg_solve_triangular(at::tril(positive), right, false)};
        }
        if (name == "lu") {
            return {std::get<0>(at::linalg_lu_factor_ex(positive)),
                    std::get<0>(at::linalg_solve_ex(positive, right))};
        }
        return {std::get<0>(at::linalg_inv_ex(positive)),
                std::get<1>(at::linalg_qr(positive[1], "r")).abs()};
    };
    run.attempt("the capture", [&] { run.operation(name, {right}, body, false); });
}

void solver_cholesky(Run& run) { solver(run, "cholesky"); }
void solver_triangular(Run& run) { solver(run, "triangular"); }
void solver_lu(Run& run) { solver(run, "lu"); }
void solver_inverse_and_qr(Run& run) { solver(run, "inverse and qr"); }

void cross_entropy_and_layer_norm(Run& run) {
    const auto x = run.ints({256, 1000}), weight = run.ints({1000}, at::kFloat, 2);
    const auto target = run.ints({256}, at::kLong, 3).abs() * 200;
    run.operation(
        "losses", {x},
        [&] {
            return Tensors{at::cross_entropy_loss(x, target),
                           at::layer_norm(x, {1000}, weight, weight),
                           at::rms_norm(x, {1000}, weight),
                           at::gelu(x),
                           at::log_softmax(x, 1),
                           at::mse_loss(x, x * 2),
                           at::cosine_similarity(x, x + 1, 1)};
        },
        false);
}

}  // namespace

std::vector<Entry> library_scenarios() {
    return {
        {"products_of_float", products_of_float, false, true},
        {"products_of_bfloat16", products_of_bfloat16, false, true},
        {"products_of_double", products_of_double, false, true},
        {"many_shapes_of_products", many_shapes_of_products},
        {"convolutions", convolutions, false, true},
        {"transforms", transforms, false, true},
        {"attention_by_math", attention_by_math, false, true},
        {"attention_by_flash", attention_by_flash},
        {"attention_by_the_efficient_kernel", attention_by_the_efficient_kernel},
        {"attention_by_cudnn", attention_by_cudnn},
        {"solver_cholesky", solver_cholesky, false, true},
        {"solver_triangular", solver_triangular, false, true},
        {"solver_lu", solver_lu, false, true},
        {"solver_inverse_and_qr", solver_inverse_and_qr, false, true},
        {"cross_entropy_and_layer_norm", cross_entropy_and_layer_norm, false, true},
    };
}

}  // namespace differential
