// Storages resized or swapped by a body, and views of its tensors.
#include "run.hpp"

namespace differential {
namespace {

void a_plain_graph(Run& run) {
    const auto x = run.ints({64, 64}), y = run.ints({64, 64}, at::kFloat, 2);
    run.operation("product", {x, y},
                  [&] { return std::vector{at::mm(x, y) + 1, at::relu(x) * y}; });
}

void resize(Run& run, at::Tensor t) {
    at::Tensor out;
    const auto x = run.ints({512 * 1024});
    const auto graph = run.capture([&] {
        t.resize_({512 * 1024});
        t.copy_(x);
        out = t * 3 + 1;
    });
    run.replay(graph);
    run.note("out", out);
    run.note("the resized one", t);
    run.check("the resized one is whole", at::equal(t, x));
    run.replay(graph);
    run.note("out once more", out);
    const auto eager = (t + 1).sum();
    run.note("read by an eager sum", eager);
    t.resize_({64});
    t.fill_(7);
    run.note("shrunk outside", t);
    t.resize_({4 * MiB});
    t.fill_(9);
    run.note("grown outside", t.slice(0, 0, 512 * 1024));
    const auto more = run.ints({4 * MiB}, at::kFloat, 3);
    run.check("an eager neighbour is whole", at::equal(more, run.ints({4 * MiB}, at::kFloat, 3)));
}

void a_storage_made_before_install_is_resized_in_the_body(Run& run) {
    auto t = run.ints({1024});
    run.way.install();
    resize(run, std::move(t));
}

void a_storage_made_before_the_capture_is_resized_in_the_body(Run& run) {
    resize(run, run.ints({1024}));
}

void an_empty_storage_made_before_install_is_an_out_argument(Run& run) {
    auto sum = at::empty({0}, run.options()), product = at::empty({0}, run.options());
    run.way.install();
    const auto x = run.ints({128, 128});
    const auto graph = run.capture([&] {
        at::add_out(sum, x, x);
        at::mm_out(product, sum, x);
    });
    run.replay(graph);
    run.note("sum", sum);
    run.note("product", product);
    run.check("the product is eager's", at::equal(product, at::mm(x + x, x)));
}

void a_storage_made_in_the_body_is_resized_there(Run& run) {
    const auto x = run.ints({256 * 1024});
    at::Tensor t, out;
    const auto graph = run.capture([&] {
        t = at::zeros({64}, run.options());
        t.resize_({256 * 1024});
        t.copy_(x);
        auto u = t * 2;
        t.resize_({128});
        u.resize_({1024 * 1024});
        u.fill_(5);
        out = u.slice(0, 0, 128) + t;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
    }
    run.check("the rest is there", at::equal(t, x.slice(0, 0, 128)));
    t.resize_({256 * 1024});
    run.check("grown within its storage", at::equal(t, x));
}

void a_storage_is_swapped_in_the_body(Run& run) {
    auto t = run.ints({4096});
    const auto u = run.ints({4096}, at::kFloat, 2);
    at::Tensor out;
    const auto graph = run.capture([&] {
        out = t * 2;
        // Frees the old storage in the capture.
        t.set_(u * 3);
        out = out + t;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("the swapped one", t);
    }
    t.set_();
    run.replay(graph);
    run.check("nothing is left in it", t.numel() == 0);
}

void a_tensor_is_rebound_to_other_data_in_the_body(Run& run) {
    auto parameter = run.ints({4096});
    const auto old = parameter.detach(), x = run.ints({4096}, at::kFloat, 2);
    const auto graph = run.capture([&] { parameter.set_data(old * 2 + x); });
    run.replay(graph);
    run.note("parameter", parameter);
    run.check("it has the new data", at::equal(parameter, run.ints({4096}) * 2 + x));
    parameter.set_data(old);
    // Writes to memory without an owner.
    run.replay(graph);
    run.check("the old data is whole", at::equal(parameter, run.ints({4096})));
}

void views_and_aliases_are_kept_past_the_graph(Run& run) {
    const auto x = run.ints({64, 96});
    at::Tensor row, transposed, alias, strided, unfolded;
    {
        const auto graph = run.capture([&] {
            const auto base = x * 2 + 1;
            row = base.select(0, 3);
            transposed = base.t();
            alias = at::alias(base);
            strided = base.as_strided({8, 8}, {96, 3}, 5);
            unfolded = (base * 3).unfold(1, 16, 8);
        });
        run.replay(graph);
    }
    const auto base = x * 2 + 1;
    run.note("row", row);
    run.note("transposed", transposed);
    run.note("strided", strided);
    run.note("unfolded", unfolded);
    run.check("they are right", at::equal(alias, base) && at::equal(row, base.select(0, 3)) &&
                                    at::equal(transposed, base.t()));
    alias.zero_();
    run.check("they are one storage", row.sum().item<float>() == 0);
    const auto filler = run.ints({1024 * 1024});
    run.check("nobody else has it",
              strided.count_nonzero().item<std::int64_t>() == 0 && filler.numel() == 1024 * 1024);
}

void inputs_are_changed_in_place(Run& run) {
    auto state = run.ints({4096});
    const auto step = run.ints({4096}, at::kFloat, 2);
    const auto graph = run.capture([&] {
        state.mul_(2).sub_(step);
        state.slice(0, 0, 16).zero_();
        state.clamp_(-1000, 1000);
    });
    for (int turn = 0; turn < 4; ++turn) {
        run.replay(graph);
        run.note("state", state);
    }
}

void memory_that_no_tensor_made_is_read_by_a_graph(Run& run) {
    const auto x = run.ints({1000});
    at::Tensor out;
    const auto first = run.capture([&] { out = x * 5; });
    const auto blob = at::from_blob(out.data_ptr(), {10, 100}, out.options());
    run.replay(first);
    run.note("blob", blob);
    run.check("sums", at::equal(blob.sum(), (x * 5).sum()));
}

void tensors_without_bytes_are_made_in_the_body(Run& run) {
    const auto x = run.ints({16});
    at::Tensor empty, out;
    const auto graph = run.capture([&] {
        empty = at::empty({0, 7}, run.options());
        out = at::cat({x, empty.view(-1), x.slice(0, 0, 0), x});
    });
    run.replay(graph);
    run.note("out", out);
    run.check("no pointer", empty.data_ptr() == nullptr);
}

}  // namespace

std::vector<Entry> storage_scenarios() {
    return {
        {"a_plain_graph", a_plain_graph, false, true},
        {"a_storage_made_before_install_is_resized_in_the_body",
         a_storage_made_before_install_is_resized_in_the_body, true, true},
        {"a_storage_made_before_the_capture_is_resized_in_the_body",
         a_storage_made_before_the_capture_is_resized_in_the_body, false, true},
        {"an_empty_storage_made_before_install_is_an_out_argument",
         an_empty_storage_made_before_install_is_an_out_argument, true, true},
        {"a_storage_made_in_the_body_is_resized_there", a_storage_made_in_the_body_is_resized_there,
         false, true},
        {"a_storage_is_swapped_in_the_body", a_storage_is_swapped_in_the_body},
        {"a_tensor_is_rebound_to_other_data_in_the_body",
         a_tensor_is_rebound_to_other_data_in_the_body},
        {"views_and_aliases_are_kept_past_the_graph", views_and_aliases_are_kept_past_the_graph,
         false, true},
        {"inputs_are_changed_in_place", inputs_are_changed_in_place},
        {"memory_that_no_tensor_made_is_read_by_a_graph",
         memory_that_no_tensor_made_is_read_by_a_graph},
        {"tensors_without_bytes_are_made_in_the_body", tensors_without_bytes_are_made_in_the_body,
         false, true},
    };
}

}  // namespace differential
