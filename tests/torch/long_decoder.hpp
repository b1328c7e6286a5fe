// Decoder for prompts of up to 32,768 tokens: graphs for decodes and short prompts, an EagerScope
// for long prompts. Needs a GPU.
#pragma once

#include "elastic.hpp"

#include <cmath>
#include <limits>
#include <vmmgraph/torch_eager.hpp>

#include "../../examples/xllm_executor/batch.hpp"

namespace torch_tests {

using vmmgraph::torch::EagerScope;
using xllm_example::Sequence;

inline constexpr std::int64_t longest_prompt = 32'768;
// Prompts up to this length are padded to it and prefilled by a graph.
inline constexpr std::int64_t short_prompt = 256;
// Maximum length with a short and with a long prompt.
inline constexpr std::int64_t short_tokens = 640, long_tokens = longest_prompt + 256;

// Grouped-query attention over paged keys and values, a gated layer, learned positions.
class Decoder {
public:
    static constexpr std::int64_t layers = 8, hidden = 1024, heads = 8, kv_heads = 4,
                                  dimension = 128, wide = 8192, vocabulary = 4096;

    Decoder() {
        const auto weight = [](std::int64_t in, std::int64_t out) {
            return at::randn({in, out}, half()) * (1.0 / std::sqrt(static_cast<double>(in)));
        };
        embedding_ = at::randn({vocabulary, hidden}, half());
        place_ = at::randn({long_tokens, hidden}, half());
        head_ = weight(hidden, vocabulary);
        for (std::int64_t i = 0; i < layers; ++i) {
            layers_.push_back({weight(hidden, (heads + 2 * kv_heads) * dimension),
                               weight(heads * dimension, hidden), weight(hidden, 2 * wide),
                               weight(wide, hidden)});
        }
        places_ = at::arange(long_tokens, numbers());
    }

    // Fills the cache and returns the token after position `last`.
    [[nodiscard]] at::Tensor prefill(const std::vector<at::Tensor>& planes,
                                     const at::Tensor& tokens, const at::Tensor& block,
                                     const at::Tensor& offset, const at::Tensor& last) const {
        const auto n = tokens.size(0);
        const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                std::size_t) {
            const auto all_heads = [&](const at::Tensor& of) {
                return of.transpose(0, 1)
                    .unsqueeze(1)
                    .expand({kv_heads, heads / kv_heads, n, dimension})
                    .reshape({1, heads, n, dimension});
            };
            const auto out = std::get<0>(
                at::_scaled_dot_product_flash_attention(q.transpose(0, 1).unsqueeze(0).contiguous(),
                                                        all_heads(k), all_heads(v), 0.0, true));
            return out.transpose(1, 2).reshape({n, heads * dimension});
        };
        return forward(planes, tokens, places_.narrow(0, 0, n), block, offset, attend, last);
    }

    // Returns the next token of each sequence.
    [[nodiscard]] at::Tensor decode(const std::vector<at::Tensor>& planes, const at::Tensor& tokens,
                                    const at::Tensor& positions, const at::Tensor& block,
                                    const at::Tensor& offset, const at::Tensor& table) const {
        const auto batch = tokens.size(0), length = table.size(1) * torch_tests::tokens;
        const auto beyond = places_.narrow(0, 0, length).unsqueeze(0) > positions.unsqueeze(1);
        const auto attend = [&](const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                                std::size_t layer) {
            const auto gather = [&](const at::Tensor& from) {
                return from.index({table}).flatten(1, 2);
            };
            const auto scores = at::matmul(q.view({batch, kv_heads, heads / kv_heads, dimension}),
                                           gather(planes[2 * layer]).permute({0, 2, 3, 1}));
            const auto weights =
                at::softmax((scores.to(at::kFloat) / std::sqrt(static_cast<double>(dimension)))
                                .masked_fill(beyond.view({batch, 1, 1, length}),
                                             -std::numeric_limits<double>::infinity()),
                            -1)
                    .to(at::kBFloat16);
            // Unused slots hold arbitrary values, NaN included.
            const auto values =
                gather(planes[2 * layer + 1]).masked_fill_(beyond.view({batch, length, 1, 1}), 0);
            return at::matmul(weights, values.permute({0, 2, 1, 3}))
                .reshape({batch, heads * dimension});
        };
        return forward(planes, tokens, positions, block, offset, attend,
                       places_.narrow(0, 0, batch));
    }

private:
    static at::Tensor norm(const at::Tensor& x) {
        return x / x.to(at::kFloat).pow(2).mean(-1, true).add(1e-6).sqrt().to(at::kBFloat16);
    }

    template <class Attend>
    [[nodiscard]] at::Tensor forward(const std::vector<at::Tensor>& planes,
                                     const at::Tensor& tokens, const at::Tensor& positions,
                                     const at::Tensor& block, const at::Tensor& offset,
                                     Attend&& attend, const at::Tensor& rows) const {
        const auto n = tokens.size(0);
        auto x = embedding_.index_select(0, tokens) + place_.index_select(0, positions);
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            const auto& [in, out, gate_up, down] = layers_[i];
            const auto qkv = at::mm(norm(x), in).view({n, heads + 2 * kv_heads, dimension});
            const auto k = qkv.narrow(1, heads, kv_heads),
                       v = qkv.narrow(1, heads + kv_heads, kv_heads);
            auto keys = planes[2 * i], values = planes[2 * i + 1];
            keys.index_put_({block, offset}, k);
            values.index_put_({block, offset}, v);
            x = x + at::mm(attend(qkv.narrow(1, 0, heads).contiguous(), k, v, i), out);
            const auto both = at::mm(norm(x), gate_up);
            x = x + at::mm(at::silu(both.narrow(1, 0, wide)) * both.narrow(1, wide, wide), down);
        }
        return at::mm(norm(x.index_select(0, rows)), head_).argmax(-1);
    }

    struct Layer {
        at::Tensor in, out, gate_up, down;
    };
    at::Tensor embedding_, place_, head_, places_;
    std::vector<Layer> layers_;
};

// A graph whose input array is copied before each replay.
struct Graph {
    std::int64_t rows = 0, columns = 0;
    at::Tensor inputs, output;
    std::optional<CapturedGraph> graph;
};

class Engine {
public:
    static constexpr std::int64_t short_rows = 64, long_rows = 2;

    Engine(const Decoder& decoder, SharedVmmAllocator& arena, KvTensors& kv,
           c10::cuda::CUDAStream stream)
        : decoder_(decoder), arena_(arena), kv_(kv), stream_(stream) {
        decode_short_ = decode_graph(short_rows, short_tokens / tokens);
        decode_long_ = decode_graph(long_rows, long_tokens / tokens);
        // Tokens, blocks, offsets, last index.
        prefill_.rows = 1;
        prefill_.columns = 3 * short_prompt + 1;
        prefill_.inputs = at::zeros({prefill_.columns}, numbers());
        capture_graph(prefill_, [&] {
            const auto part = [&](std::int64_t i) {
                return prefill_.inputs.narrow(0, i * short_prompt, short_prompt);
            };
            return decoder_.prefill(kv_.planes(), part(0), part(1), part(2),
                                    prefill_.inputs.narrow(0, 3 * short_prompt, 1));
        });
        graph_bytes_ = arena.mapped_size();
    }

    [[nodiscard]] std::uint64_t graph_bytes() const { return graph_bytes_; }

    // Grows the arena for the longest prompts. Their keys and values go to block 0, which has no
    // owner.
    void warm_up() {
        for (const std::int64_t length : {longest_prompt, longest_prompt / 2, longest_prompt}) {
            Sequence sequence{
                0, std::vector<std::int32_t>(static_cast<std::size_t>(length), 1), 0, 0, {}};
            sequence.blocks.assign(static_cast<std::size_t>(length / tokens), 0);
            static_cast<void>(prefill(sequence));
        }
    }

    std::int64_t prefill(Sequence& sequence) {
        const auto n = static_cast<std::int64_t>(sequence.tokens.size());
        const bool by_graph = n <= short_prompt;
        const auto padded = by_graph ? short_prompt : n;
        auto* const next = stage(3 * padded + 1);
        for (std::int64_t i = 0; i < padded; ++i) {
            next[i] = i < n ? sequence.tokens[static_cast<std::size_t>(i)] : 0;
            next[padded + i] = i < n ? sequence.blocks[static_cast<std::size_t>(i / tokens)] : 0;
            next[2 * padded + i] = i % tokens;
        }
        next[3 * padded] = n - 1;
        sequence.in_cache = n;
        if (by_graph) {
            upload(prefill_.inputs, next);
            prefill_.graph->replay(stream_.stream());
            return prefill_.output.item<std::int64_t>();
        }
        auto inputs = at::empty({3 * n + 1}, numbers());
        upload(inputs, next);
        const EagerScope scope(arena_, stream_.stream());
        const auto part = [&](std::int64_t i) { return inputs.narrow(0, i * n, n); };
        // No tensor outlives the scope.
        return decoder_.prefill(kv_.planes(), part(0), part(1), part(2), inputs.narrow(0, 3 * n, 1))
            .item<std::int64_t>();
    }

    std::vector<std::int64_t> decode(const std::vector<Sequence*>& sequences) {
        std::vector<std::size_t> shorts, longs;
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            (sequences[i]->blocks.size() > short_tokens / tokens ? longs : shorts).push_back(i);
        }
        used_ = 0;
        const auto rows =
            static_cast<std::int64_t>(sequences.size()) + 2 * short_rows + 2 * long_rows;
        if (!results_.defined() || results_.size(0) < rows) {
            results_ = at::empty({2 * rows}, numbers());
        }
        std::vector<std::size_t> order;
        std::int64_t at = 0;
        for (const auto& [which, graph] :
             {std::pair{&shorts, &decode_short_}, std::pair{&longs, &decode_long_}}) {
            const auto most = static_cast<std::size_t>(graph->rows);
            for (std::size_t first = 0; first < which->size(); first += most) {
                const auto count = std::min(most, which->size() - first);
                std::vector<Sequence*> some;
                for (std::size_t i = 0; i < count; ++i) {
                    some.push_back(sequences[(*which)[first + i]]);
                    order.push_back((*which)[first + i]);
                }
                run(*graph, some);
                results_.narrow(0, at, static_cast<std::int64_t>(count))
                    .copy_(graph->output.narrow(0, 0, static_cast<std::int64_t>(count)));
                at += static_cast<std::int64_t>(count);
            }
        }
        const auto got = results_.narrow(0, 0, at).cpu();
        std::vector<std::int64_t> next(sequences.size());
        for (std::size_t i = 0; i < order.size(); ++i) {
            next[order[i]] = got.const_data_ptr<std::int64_t>()[i];
        }
        return next;
    }

private:
    template <class Body>
    void capture_graph(Graph& graph, Body&& body) {
        // One-time setup of the kernels.
        static_cast<void>(body());
        cudaDeviceSynchronize();
        graph.graph.emplace(capture(arena_, stream_.stream(), [&] { graph.output = body(); }));
    }

    Graph decode_graph(std::int64_t rows, std::int64_t table) {
        Graph made;
        made.rows = rows;
        made.columns = 4 + table;
        made.inputs = at::zeros({made.columns, rows}, numbers());
        capture_graph(made, [&] {
            return decoder_.decode(kv_.planes(), made.inputs[0], made.inputs[1], made.inputs[2],
                                   made.inputs[3],
                                   made.inputs.narrow(0, 4, table).t().contiguous());
        });
        return made;
    }

    void run(Graph& graph, const std::vector<Sequence*>& sequences) {
        const auto table = graph.columns - 4;
        auto* const next = stage(graph.rows * graph.columns);
        std::fill_n(next, graph.rows * graph.columns, 0);
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            auto& sequence = *sequences[i];
            const auto place = static_cast<std::int64_t>(sequence.tokens.size()) - 1;
            const auto row = static_cast<std::int64_t>(i);
            const auto set = [&](std::int64_t column, std::int64_t value) {
                next[column * graph.rows + row] = value;
            };
            set(0, sequence.tokens.back());
            set(1, place);
            set(2, sequence.blocks[static_cast<std::size_t>(place / tokens)]);
            set(3, place % tokens);
            for (std::int64_t column = 0;
                 column < table && column < static_cast<std::int64_t>(sequence.blocks.size());
                 ++column) {
                set(4 + column, sequence.blocks[static_cast<std::size_t>(column)]);
            }
            sequence.in_cache = place + 1;
        }
        upload(graph.inputs, next);
        graph.graph->replay(stream_.stream());
    }

    // Host memory reserved until the step ends.
    std::int64_t* stage(std::int64_t count) {
        if (used_ == stages_.size()) {
            stages_.emplace_back();
        }
        auto& memory = stages_[used_++];
        if (!memory.defined() || memory.numel() < count) {
            memory = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
        }
        return memory.data_ptr<std::int64_t>();
    }

    void upload(const at::Tensor& to, const std::int64_t* from) {
        C10_CUDA_CHECK(cudaMemcpyAsync(to.data_ptr(), from, to.nbytes(), cudaMemcpyHostToDevice,
                                       stream_.stream()));
    }

    const Decoder& decoder_;
    SharedVmmAllocator& arena_;
    KvTensors& kv_;
    c10::cuda::CUDAStream stream_;
    Graph decode_short_, decode_long_, prefill_;
    std::uint64_t graph_bytes_ = 0;
    std::vector<at::Tensor> stages_;
    std::size_t used_ = 0;
    at::Tensor results_;
};

}  // namespace torch_tests
