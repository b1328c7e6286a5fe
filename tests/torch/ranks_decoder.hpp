// One rank of a tensor-parallel decoder, with NCCL's all-reduce and the one of examples/all_reduce.
#pragma once

#include "nccl.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "../../examples/all_reduce/two_shot.hpp"

namespace torch_tests {

// A rank's addend.
struct Sum {
    void* input = nullptr;
    void* part = nullptr;
    std::int64_t elements = 0;
};

// Sums the result of `make` over both ranks on the current stream.
using AllReduce = std::function<at::Tensor(const std::function<at::Tensor()>& make)>;

// Has half of the heads and of the middle dimension. In float32 a sum of two does not depend on the
// order.
class RankDecoder {
public:
    static constexpr std::int64_t layers = 8, hidden = 1024, heads = 8, dimension = 64,
                                  middle = 2048, context = 64;

    RankDecoder(int rank, std::int64_t most) {
        const auto options = floats(rank);
        at::manual_seed(1000 + rank);
        const auto make = [&](std::int64_t rows, std::int64_t columns) {
            return at::randn({rows, columns}, options) / std::sqrt(static_cast<double>(rows));
        };
        for (int i = 0; i < layers; ++i) {
            layers_.push_back({make(hidden, 3 * heads * dimension), make(heads * dimension, hidden),
                               make(hidden, middle), make(hidden, middle), make(middle, hidden),
                               at::randn({most, heads, context, dimension}, options),
                               at::randn({most, heads, context, dimension}, options)});
        }
    }

    // Decodes one token for each of the first sequences.
    at::Tensor operator()(at::Tensor x, const AllReduce& all_reduce) const {
        const auto batch = x.size(0);
        const auto normed = [](const at::Tensor& of) {
            return of * (of.pow(2).mean(-1, true) + 1e-6).rsqrt();
        };
        for (const auto& layer : layers_) {
            const auto qkv = at::mm(normed(x), layer.qkv).view({batch, 3, heads, dimension});
            const auto keys = layer.keys.narrow(0, 0, batch),
                       values = layer.values.narrow(0, 0, batch);
            keys.select(2, context - 1).copy_(qkv.select(1, 1));
            values.select(2, context - 1).copy_(qkv.select(1, 2));
            const auto scores = at::matmul(qkv.select(1, 0).unsqueeze(2), keys.transpose(-1, -2)) /
                                std::sqrt(double{dimension});
            const auto seen =
                at::matmul(at::softmax(scores, -1), values).reshape({batch, heads * dimension});
            x = x + all_reduce([&] { return at::mm(seen, layer.out); });
            const auto h = normed(x);
            const auto inner = at::silu(at::mm(h, layer.gate)) * at::mm(h, layer.up);
            x = x + all_reduce([&] { return at::mm(inner, layer.down); });
        }
        return x;
    }

private:
    struct Layer {
        at::Tensor qkv, out, gate, up, down, keys, values;
    };
    std::vector<Layer> layers_;
};

}  // namespace torch_tests
