// Random numbers in and around graphs.
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "run.hpp"

namespace differential {
namespace {

std::vector<at::Tensor> draw(const Run& run) {
    const auto x = run.ints({1000});
    return {at::rand({1001}, run.options()),
            at::randn({1001}, run.options(at::kBFloat16)),
            at::randint(100, {500}, run.options(at::kLong)),
            at::dropout(x, 0.3, true),
            at::bernoulli(at::full({1000}, 0.25, run.options())),
            at::empty({333}, run.options(at::kDouble)).normal_(2, 3),
            at::empty({333}, run.options()).exponential_(),
            at::empty({333}, run.options()).geometric_(0.2),
            at::empty({333}, run.options(at::kInt)).random_(5, 50)};
}

void numbers_of_all_kinds(Run& run) {
    const auto x = run.ints({1000});
    run.eagerly([&] { draw(run); });
    at::manual_seed(3);
    std::vector<at::Tensor> numbers, first;
    // Not draw(): its inputs come from the host.
    const auto graph = run.capture([&] {
        numbers = {at::rand({1001}, run.options()),
                   at::randn({1001}, run.options(at::kBFloat16)),
                   at::randint(100, {500}, run.options(at::kLong)),
                   at::dropout(x, 0.3, true),
                   at::empty({333}, run.options(at::kDouble)).normal_(2, 3),
                   at::empty({333}, run.options()).exponential_(),
                   at::empty({333}, run.options(at::kInt)).random_(5, 50)};
    });
    for (int turn = 0; turn < 3; ++turn) {
        run.replay(graph);
        for (const auto& one : numbers) {
            run.note("numbers", one);
        }
        run.check("they are new", first.empty() || !at::equal(numbers[0], first[0]));
        first = {numbers[0].clone()};
    }
    run.note("offset",
             static_cast<std::int64_t>(at::cuda::detail::getDefaultCUDAGenerator(0).get_offset()));
    for (const auto& one : draw(run)) {
        run.note("eager numbers afterwards", one);
    }
}

void eager_numbers_between_replays(Run& run) {
    at::manual_seed(4);
    at::Tensor numbers;
    const auto graph = run.capture(
        [&] { numbers = at::rand({1000}, run.options()) + at::rand({1000}, run.options()); });
    for (int turn = 0; turn < 3; ++turn) {
        run.replay(graph);
        run.note("of the graph", numbers);
        run.note("eager", at::rand({100}, run.options()));
    }
    at::manual_seed(4);
    const auto first = at::rand({1000}, run.options()), second = at::rand({1000}, run.options());
    at::manual_seed(4);
    run.replay(graph);
    run.check("they are eager's", at::equal(numbers, first + second));
}

void two_graphs_that_draw(Run& run) {
    at::manual_seed(5);
    at::Tensor a, b;
    auto first = run.capture([&] { a = at::rand({1000}, run.options()); });
    const auto second = run.capture(
        [&] { b = at::randn({3000}, run.options()) * at::rand({3000}, run.options()); });
    for (int turn = 0; turn < 3; ++turn) {
        run.replay(second);
        run.note("b", b);
        run.replay(first);
        run.note("a", a);
        run.replay(second);
        run.note("b", b);
    }
    first.reset();
    run.replay(second);
    run.note("b alone", b);
}

void seeds_and_states_between_replays(Run& run) {
    const auto x = run.ints({1000});
    at::manual_seed(6);
    at::Tensor numbers;
    const auto graph = run.capture([&] { numbers = at::dropout(x, 0.5, true); });
    auto generator = at::cuda::detail::getDefaultCUDAGenerator(0);
    const auto state = generator.get_state();
    run.replay(graph);
    run.note("first", numbers);
    const auto first = numbers.clone();
    run.replay(graph);
    run.note("second", numbers);
    generator.set_state(state);
    run.replay(graph);
    run.check("the state brings the first back", at::equal(numbers, first));
    at::manual_seed(77);
    run.replay(graph);
    run.note("another seed", numbers);
    generator.set_offset(4000);
    run.replay(graph);
    run.note("another offset", numbers);
    run.note("the seed", static_cast<std::int64_t>(generator.current_seed()));
}

void a_second_generator_that_is_not_named(Run& run) {
    auto generator = at::cuda::detail::createCUDAGenerator(0);
    generator.set_current_seed(8);
    run.attempt("the capture", [&] {
        static_cast<void>(
            run.capture([&] { static_cast<void>(at::rand({1000}, generator, run.options())); }));
    });
    run.note("eager numbers of it", at::rand({1000}, generator, run.options()));
}

void a_second_generator_that_is_named(Run& run) {
    auto generator = at::cuda::detail::createCUDAGenerator(0),
         other = at::cuda::detail::createCUDAGenerator(0);
    generator.set_current_seed(8);
    other.set_current_seed(9);
    at::manual_seed(10);
    run.attempt("named: the capture", [&] {
        at::Tensor a, b, c;
        const auto graph = run.way.capture(run.stream(),
                                           [&] {
                                               a = at::rand({1000}, generator, run.options());
                                               b = at::randn({1000}, other, run.options());
                                               c = at::rand({1000}, run.options());
                                           },
                                           {generator, other});
        for (int turn = 0; turn < 2; ++turn) {
            run.replay(graph);
            run.note("named: a", a);
            run.note("named: b", b);
            run.note("named: c", c);
        }
    });
}

void an_eager_generator_beside_a_graph(Run& run) {
    auto generator = at::cuda::detail::createCUDAGenerator(0);
    generator.set_current_seed(8);
    at::manual_seed(10);
    at::Tensor numbers;
    const auto graph = run.capture([&] { numbers = at::rand({1000}, run.options()); });
    for (int turn = 0; turn < 3; ++turn) {
        run.note("of the other generator", at::rand({1000}, generator, run.options()));
        run.replay(graph);
        run.note("of the graph", numbers);
    }
}

void numbers_on_side_streams_and_in_backward(Run& run) {
    const auto x = run.ints({1000});
    at::manual_seed(12);
    at::Tensor side, grad;
    const auto graph = run.capture([&] {
        forked(run.stream(), Run::side(0), [&] { side = at::rand({1000}, run.options()); });
        auto w = x.detach().clone().requires_grad_(true);
        const auto loss = (at::dropout(w * 2, 0.5, true) * 3).sum();
        loss.backward();
        grad = w.grad();
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("side", side);
        run.note("gradient", grad);
    }
}

void attention_with_dropout(Run& run) {
    const auto q = run.reals({2, 4, 128, 64}, at::kBFloat16);
    run.eagerly([&] { static_cast<void>(at::scaled_dot_product_attention(q, q, q, {}, 0.5)); });
    at::manual_seed(13);
    at::Tensor out;
    const auto graph =
        run.capture([&] { out = at::scaled_dot_product_attention(q, q, q, {}, 0.5); });
    at::Tensor first;
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.check("it is new", !first.defined() || !at::equal(first, out));
        first = out.clone();
    }
}

void a_seed_in_the_body(Run& run) {
    at::manual_seed(14);
    at::Tensor numbers;
    run.attempt("another seed", [&] {
        const auto graph = run.capture([&] {
            auto generator = at::cuda::detail::getDefaultCUDAGenerator(0);
            generator.set_current_seed(15);
            numbers = at::rand({1000}, run.options());
        });
        run.replay(graph);
        run.note("numbers", numbers);
    });
    at::manual_seed(16);
    run.note("eager numbers", at::rand({1000}, run.options()));
}

void graphs_that_draw_nothing_leave_the_generator_alone(Run& run) {
    const auto x = run.ints({1000});
    at::manual_seed(17);
    at::Tensor out;
    const auto graph = run.capture([&] { out = x * 2; });
    run.replay(graph);
    run.replay(graph);
    run.note("offset",
             static_cast<std::int64_t>(at::cuda::detail::getDefaultCUDAGenerator(0).get_offset()));
    const auto numbers = at::rand({1000}, run.options());
    at::manual_seed(17);
    run.check("the first numbers", at::equal(numbers, at::rand({1000}, run.options())));
}

}  // namespace

std::vector<Entry> random_scenarios() {
    return {
        {"numbers_of_all_kinds", numbers_of_all_kinds},
        {"eager_numbers_between_replays", eager_numbers_between_replays},
        {"two_graphs_that_draw", two_graphs_that_draw},
        {"seeds_and_states_between_replays", seeds_and_states_between_replays},
        {"a_second_generator_that_is_not_named", a_second_generator_that_is_not_named},
        {"a_second_generator_that_is_named", a_second_generator_that_is_named},
        {"an_eager_generator_beside_a_graph", an_eager_generator_beside_a_graph},
        {"numbers_on_side_streams_and_in_backward", numbers_on_side_streams_and_in_backward},
        {"attention_with_dropout", attention_with_dropout},
        {"a_seed_in_the_body", a_seed_in_the_body},
        {"graphs_that_draw_nothing_leave_the_generator_alone",
         graphs_that_draw_nothing_leave_the_generator_alone},
    };
}

}  // namespace differential
