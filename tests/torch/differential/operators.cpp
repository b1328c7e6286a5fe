// Torch's own kernels in a body.
#include "run.hpp"

namespace differential {
namespace {

using Tensors = std::vector<at::Tensor>;

void sorting(Run& run) {
    const auto x = run.ints({64, 4096});
    const auto flat = run.ints({200000}, at::kInt, 3);
    run.operation("sort", {x, flat}, [&] {
        const auto [sorted, indices] = at::sort(x, std::optional<bool>(true), 1, false);
        const auto [whole, order] = at::sort(flat, std::optional<bool>(true), 0, true);
        return Tensors{sorted, indices, whole, order, at::argsort(x, /*stable=*/true, 0, false)};
    });
    run.operation("top-k", {x}, [&] {
        // Values only: ties allow any index.
        return Tensors{std::get<0>(at::topk(x, 17, 1)), std::get<0>(at::topk(x, 5, 0, false)),
                       std::get<0>(at::kthvalue(x, 100, 1))};
    });
    run.operation("median and mode", {x}, [&] {
        return Tensors{std::get<0>(at::median(x, 1)), std::get<0>(at::max(x, 1)), at::amin(x, {0})};
    });
}

void indexing(Run& run) {
    const auto x = run.ints({512, 256}), values = run.ints({300, 256}, at::kFloat, 2);
    const auto rows = run.ints({300}, at::kLong, 3).abs() * 60,
               columns = run.ints({300}, at::kLong, 4).abs() * 30;
    const auto mask = run.ints({512, 256}, at::kFloat, 5) > 0;
    run.operation("index_put", {x, values}, [&] {
        auto accumulated = x.clone(), put = x.clone();
        accumulated.index_put_({rows}, values, true);
        put.index_put_({rows, columns}, at::full({}, 7, x.options()));
        return Tensors{accumulated, put, at::index(x, {rows, columns}), x.index_select(0, rows)};
    });
    run.operation("masks", {x}, [&] {
        return Tensors{x.masked_fill(mask, 9), at::where(mask, x, -x),
                       at::masked_scatter(x, mask, x * 2), at::tril(x),
                       at::diag(x.slice(0, 0, 256))};
    });
    run.operation("gather and take", {x}, [&] {
        const auto index = rows.unsqueeze(1).expand({300, 256});
        return Tensors{at::gather(x, 0, index), at::take(x, columns),
                       at::index_add(x, 0, rows, values), at::flip(x, {0, 1}), at::roll(x, 3, 1)};
    });
}

void scattering(Run& run) {
    const auto x = run.ints({256, 512}), source = run.ints({256, 512}, at::kFloat, 2);
    // Distinct within each row.
    const auto places = at::arange(512, run.options(at::kLong))
                            .mul(7)
                            .remainder(512)
                            .unsqueeze(0)
                            .expand({256, 512})
                            .contiguous();
    const auto crowded = run.ints({256, 512}, at::kLong, 3).abs();
    run.operation("scatter", {x, source}, [&] {
        return Tensors{at::scatter(x, 1, places, source), at::scatter_add(x, 1, crowded, source),
                       at::scatter_reduce(x, 1, crowded, source, "amax")};
    });
    run.operation("histogram", {x}, [&] {
        return Tensors{at::bucketize(x, at::arange(-3, 4, run.options())), at::histc(x, 9, -4, 4)};
    });
}

void scans_and_sums(Run& run) {
    const auto x = run.ints({100, 3000}), flat = run.ints({500000}, at::kFloat, 2);
    run.operation("scans", {x, flat}, [&] {
        return Tensors{at::cumsum(x, 1), at::cumsum(flat, 0), at::cumsum(x, 0, at::kLong),
                       std::get<0>(at::cummax(x, 1)), at::diff(x)};
    });
    run.operation("sums", {x, flat}, [&] {
        return Tensors{flat.sum(),           x.sum(0), x.sum(1, true, at::kDouble),
                       at::count_nonzero(x), x.any(),  at::amax(flat),
                       at::argmax(x.sum(0))};
    });
    run.operation("more sums", {x}, [&] {
        return Tensors{std::get<0>(at::var_mean(x, 1)), at::norm(x), at::softmax(x, 1),
                       at::logsumexp(x, {1})};
    });
}

void embedding(Run& run) {
    const auto table = run.ints({1000, 64});
    const auto indices = run.ints({32, 16}, at::kLong, 2).abs() * 200;
    const auto offsets = at::arange(0, 512, 16, run.options(at::kLong));
    run.operation("embedding", {table}, [&] {
        const auto bag = at::embedding_bag(table, indices.view(-1), offsets, false, 0);
        return Tensors{at::embedding(table, indices), std::get<0>(bag),
                       at::one_hot(indices.view(-1).remainder(7), 7)};
    });
    const auto grad = run.ints({32, 16, 64}, at::kFloat, 3);
    run.operation("its gradient", {grad}, [&] {
        return Tensors{at::embedding_dense_backward(grad, indices, 1000, -1, false)};
    });
}

void pointwise_of_all_types(Run& run) {
    for (const auto type :
         {at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kLong, at::kChar}) {
        const auto x = run.ints({777, 33}, type), y = run.ints({777, 33}, type, 2);
        run.operation(at::toString(type), {x, y}, [&] {
            return Tensors{x + y * 2, at::maximum(x, y), at::bitwise_or(x > 0, y > 0),
                           x.to(at::kFloat) / 3, at::cat({x, y}, 1).t().contiguous()};
        });
    }
    const auto z = at::complex(run.ints({1000}), run.ints({1000}, at::kFloat, 2));
    run.operation("complex", {z},
                  [&] { return Tensors{at::view_as_real(z * z), at::abs(z), at::real(z.conj())}; });
}

void shapes_and_copies(Run& run) {
    const auto x = run.ints({8, 16, 32, 4});
    run.operation("shapes", {x}, [&] {
        return Tensors{
            x.permute({3, 1, 0, 2}).contiguous(),
            at::stack({x, x * 2}, 2),
            at::repeat_interleave(x, 3, 1),
            at::constant_pad_nd(x, {1, 2, 0, 3}, 5),
            x.contiguous(at::MemoryFormat::ChannelsLast) + 1,
            at::meshgrid({at::arange(5, run.options()), at::arange(7, run.options())}, "ij")[1]
                .contiguous(),
            at::linspace(0, 64, 65, run.options()),
            x.unfold(2, 8, 4).clone(),
            at::kron(x.select(0, 0).select(0, 0), x.select(0, 1).select(0, 2))};
    });
}

void many_tensors_at_once(Run& run) {
    std::vector<at::Tensor> x, y;
    for (int i = 0; i < 30; ++i) {
        x.push_back(run.ints({1000 * (i + 1)}, at::kFloat, static_cast<std::uint64_t>(i)));
        y.push_back(run.ints({1000 * (i + 1)}, at::kFloat, static_cast<std::uint64_t>(i) + 100));
    }
    run.operation("foreach", x, [&] {
        auto sums = at::_foreach_add(x, y, 2);
        at::_foreach_mul_(sums, 3);
        auto all = at::_foreach_addcmul(sums, x, y, 1);
        return all;
    });
}

void a_step_of_decoding(Run& run) {
    // Written at a position in a tensor.
    const auto cache = at::zeros({4, 128, 64}, run.options());
    const auto position = at::zeros({4}, run.options(at::kLong)), token = run.ints({4, 64});
    const auto rows = at::arange(4, run.options(at::kLong));
    at::Tensor scores, next;
    const auto graph = run.capture([&] {
        cache.index_put_({rows, position}, token);
        const auto seen =
            at::arange(128, run.options(at::kLong)).unsqueeze(0) <= position.unsqueeze(1);
        scores =
            at::bmm(cache, token.unsqueeze(2)).squeeze(2).masked_fill(seen.logical_not(), -1000);
        next = at::argmax(scores * 1000 - at::arange(128, run.options()), 1);
        token.copy_(at::roll(token, 1, 1) + next.unsqueeze(1).remainder(3) - 1);
        position.add_(1);
    });
    run.eagerly([&] {
        cache.zero_();
        position.zero_();
        token.copy_(run.ints({4, 64}));
    });
    for (int step = 0; step < 12; ++step) {
        run.replay(graph);
        run.note("step " + std::to_string(step), next);
    }
    run.note("scores", scores);
    run.note("cache", cache);
}

}  // namespace

std::vector<Entry> operator_scenarios() {
    return {
        {"sorting", sorting, false, true},
        {"indexing", indexing, false, true},
        {"scattering", scattering, false, true},
        {"scans_and_sums", scans_and_sums, false, true},
        {"embedding", embedding, false, true},
        {"pointwise_of_all_types", pointwise_of_all_types, false, true},
        {"shapes_and_copies", shapes_and_copies, false, true},
        {"many_tensors_at_once", many_tensors_at_once, false, true},
        {"a_step_of_decoding", a_step_of_decoding, false, true},
    };
}

}  // namespace differential
