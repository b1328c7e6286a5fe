// Bodies that differentiate: backward allocates and frees for the capture on torch's threads.
#include "run.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace differential {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().requires_grad_(true); }

struct Layers {
    at::Tensor first, second;
    explicit Layers(const Run& run)
        : first(leaf(run.ints({64, 96}))), second(leaf(run.ints({96, 16}, at::kFloat, 2))) {}
    at::Tensor loss(const at::Tensor& x, const at::Tensor& target) const {
        return (at::mm(at::relu(at::mm(x, first)), second) - target).sum();
    }
    variable_list all() const { return {first, second}; }
};

void gradients_of_a_body(Run& run) {
    const Layers layers(run);
    const auto x = run.ints({32, 64}, at::kFloat, 3), target = run.ints({32, 16}, at::kFloat, 4);
    run.operation("gradients", {x}, [&] {
        const auto loss = layers.loss(x, target);
        auto result = torch::autograd::grad({loss}, layers.all());
        result.push_back(loss.detach());
        return result;
    });
}

void backward_into_static_gradients(Run& run) {
    const Layers layers(run);
    const auto x = run.ints({32, 64}, at::kFloat, 3), target = run.ints({32, 16}, at::kFloat, 4);
    // Usual warm-up, on a side stream; the capture creates new gradients.
    run.eagerly([&] { layers.loss(x, target).backward(); });
    layers.first.mutable_grad() = at::Tensor();
    layers.second.mutable_grad() = at::Tensor();
    const auto graph = run.capture([&] { layers.loss(x, target).backward(); });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("first", layers.first.grad());
        run.note("second", layers.second.grad());
    }
}

void gradients_add_up_over_replays(Run& run) {
    const Layers layers(run);
    const auto x = run.ints({32, 64}, at::kFloat, 3), target = run.ints({32, 16}, at::kFloat, 4);
    run.eagerly([&] { layers.loss(x, target).backward(); });
    const auto graph = run.capture([&] {
        const auto loss = layers.loss(x, target);
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
    });
    run.eagerly([&] {
        layers.first.mutable_grad().zero_();
        layers.second.mutable_grad().zero_();
    });
    for (int turn = 0; turn < 3; ++turn) {
        run.replay(graph);
        run.note("first", layers.first.grad());
    }
}

void hooks_on_tensors(Run& run) {
    const auto w = leaf(run.ints({64, 64}));
    const auto x = run.ints({64, 64}, at::kFloat, 2);
    int calls = 0;
    std::vector<at::Tensor> seen;
    const auto graph = run.capture([&] {
        const auto y = at::mm(x, w);
        y.register_hook([&](const at::Tensor& grad) {
            ++calls;
            seen.push_back(grad * 2);
            return grad * 3;
        });
        w.register_hook([&](const at::Tensor& grad) { seen.push_back(grad + 1); });
        seen.push_back(torch::autograd::grad({(y * y).sum()}, {w})[0]);
    });
    run.note("calls", calls);
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        for (const auto& tensor : seen) {
            run.note("seen", tensor);
        }
    }
    run.note("calls by then", calls);
}

struct Squares : torch::autograd::Function<Squares> {
    static Variable forward(AutogradContext* context, const Variable& x, double factor) {
        context->save_for_backward({x});
        context->saved_data["factor"] = factor;
        return x * x * factor;
    }
    static variable_list backward(AutogradContext* context, variable_list grads) {
        const auto x = context->get_saved_variables()[0];
        return {grads[0] * x * (2 * context->saved_data["factor"].toDouble()), Variable()};
    }
};

void a_function_of_the_programs(Run& run) {
    const auto x = run.ints({128, 128});
    run.operation("squares", {x}, [&] {
        const auto w = leaf(x);
        const auto y = Squares::apply(w, 3.0);
        return std::vector{y.detach(),
                           torch::autograd::grad({Squares::apply(y, 0.5).sum()}, {w})[0]};
    });
}

// Recomputes intermediates for the gradients.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
    static Variable between(const Variable& x, const Variable& w) {
        return at::relu(at::mm(at::relu(at::mm(x, w)), w));
    }
    static Variable forward(AutogradContext* context, const Variable& x, const Variable& w) {
        context->save_for_backward({x, w});
        const at::NoGradGuard without;
        return between(x, w);
    }
    static variable_list backward(AutogradContext* context, variable_list grads) {
        const auto saved = context->get_saved_variables();
        const at::AutoGradMode with(true);
        const auto x = leaf(saved[0]), w = leaf(saved[1]);
        return torch::autograd::grad({between(x, w)}, {x, w}, grads);
    }
};

void what_is_computed_again_in_backward(Run& run) {
    const auto x = run.ints({64, 64}), values = run.ints({64, 64}, at::kFloat, 2).clamp(-1, 1);
    run.operation("checkpoint", {x}, [&] {
        const auto w = leaf(values);
        auto y = x * 1;
        for (int i = 0; i < 2; ++i) {
            y = Checkpoint::apply(y, w).remainder(7);
        }
        return torch::autograd::grad({y.sum()}, {w});
    });
}

void gradients_of_gradients(Run& run) {
    const auto x = run.ints({64, 64});
    run.operation("twice", {x}, [&] {
        const auto w = leaf(x);
        const auto first = torch::autograd::grad({(w * w * w).sum()}, {w}, {}, true, true)[0];
        const auto second = torch::autograd::grad({(first * first).sum()}, {w})[0];
        return std::vector{first.detach(), second};
    });
}

void a_training_step(Run& run) {
    const Layers layers(run);
    const auto momentum = at::zeros_like(layers.first), loss_sum = at::zeros({1}, run.options());
    const auto x = run.ints({32, 64}, at::kFloat, 3), target = run.ints({32, 16}, at::kFloat, 4);
    const auto step = [&] {
        const auto loss = layers.loss(x, target);
        const auto grads = torch::autograd::grad({loss}, layers.all());
        const at::NoGradGuard without;
        momentum.mul_(0.5).add_(grads[0].clamp(-8, 8));
        layers.first.sub_(momentum.round()).clamp_(-16, 16);
        layers.second.sub_(grads[1].clamp(-2, 2)).clamp_(-16, 16);
        loss_sum.add_(loss);
    };
    const auto graph = run.capture(step);
    const auto reset = [&] {
        const at::NoGradGuard without;
        layers.first.copy_(run.ints({64, 96}));
        layers.second.copy_(run.ints({96, 16}, at::kFloat, 2));
        momentum.zero_();
        loss_sum.zero_();
    };
    run.eagerly(reset);
    for (int turn = 0; turn < 5; ++turn) {
        run.replay(graph);
    }
    const auto first = layers.first.detach().clone(), sum = loss_sum.clone();
    run.note("weights", first);
    run.note("losses", sum);
    run.eagerly(reset);
    run.eagerly([&] {
        for (int turn = 0; turn < 5; ++turn) {
            step();
        }
    });
    run.check("it is eager's", at::equal(first, layers.first.detach()) && at::equal(sum, loss_sum));
}

void forward_and_backward_in_two_graphs(Run& run) {
    const auto w = leaf(run.ints({128, 128}));
    const auto x = run.ints({128, 128}, at::kFloat, 2),
               incoming = run.ints({128, 128}, at::kFloat, 3);
    at::Tensor y, grad;
    const auto forward = run.capture([&] { y = at::relu(at::mm(x, w)) * w; });
    // Not guaranteed on the MemPool route, where the graphs share memory.
    const auto backward = run.capture([&] {
        std::vector<at::Tensor> filling;
        for (int i = 0; i < 16; ++i) {
            filling.push_back(at::full({128, 128}, 99, run.options()));
        }
        grad = torch::autograd::grad({y}, {w}, {incoming})[0];
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(forward);
        run.note("forward: y", y.detach());
        run.replay(backward);
        run.note("backward: grad", grad);
    }
}

void a_tape_that_is_dropped_after_the_graph(Run& run) {
    const auto w = leaf(run.ints({128, 128}));
    at::Tensor y;
    {
        const auto graph = run.capture([&] { y = at::relu(at::mm(w, w) * w).sum(); });
        run.replay(graph);
    }
    run.tried("gradient outside", [&] { return torch::autograd::grad({y}, {w})[0]; });
    run.note("y", y.detach());
}

}  // namespace

std::vector<Entry> autograd_scenarios() {
    return {
        {"gradients_of_a_body", gradients_of_a_body, false, true},
        {"backward_into_static_gradients", backward_into_static_gradients},
        {"gradients_add_up_over_replays", gradients_add_up_over_replays, false, true},
        {"hooks_on_tensors", hooks_on_tensors},
        {"a_function_of_the_programs", a_function_of_the_programs, false, true},
        {"what_is_computed_again_in_backward", what_is_computed_again_in_backward, false, true},
        {"gradients_of_gradients", gradients_of_gradients, false, true},
        {"a_training_step", a_training_step, false, true},
        {"forward_and_backward_in_two_graphs", forward_and_backward_in_two_graphs},
        {"a_tape_that_is_dropped_after_the_graph", a_tape_that_is_dropped_after_the_graph, false,
         true},
    };
}

}  // namespace differential
