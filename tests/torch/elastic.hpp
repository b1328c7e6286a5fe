// Fixture of the KV cache tensor tests: an attention-like step over planes of blocks. Needs a GPU.
#pragma once

#include "fixture.hpp"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/TensorIndexing.h>
#include <vmmgraph/blocks.hpp>
#include <vmmgraph/policies.hpp>
#include <vmmgraph/torch_elastic.hpp>

namespace torch_tests {

using vmmgraph::BlockPool;
using vmmgraph::BlockRange;
using vmmgraph::Device;
using vmmgraph::KvLayout;
using vmmgraph::PauseFence;
using vmmgraph::torch::KvPlane;
using vmmgraph::torch::KvTensorOptions;
using vmmgraph::torch::KvTensors;

inline constexpr std::int64_t tokens = 16;
inline constexpr double GiB = 1024.0 * MiB;

inline at::TensorOptions numbers() {
    return at::TensorOptions().dtype(at::kLong).device(at::kCUDA);
}

inline const char* name_of(KvLayout layout) {
    return layout == KvLayout::by_plane ? "by plane" : "by block";
}

inline KvTensorOptions kv_options(std::size_t layers, std::int64_t heads, std::int64_t dimension,
                                  std::uint64_t blocks, KvLayout layout, std::uint64_t page_bytes) {
    KvTensorOptions options{
        {2 * layers, KvPlane{{tokens, heads, dimension}, at::kBFloat16}}, blocks, layout, {}};
    options.memory.name = "kv";
    options.memory.page_bytes = page_bytes;
    return options;
}

struct StepInputs {
    StepInputs(std::int64_t batch, std::int64_t table, std::int64_t heads, std::int64_t dimension)
        : block(at::zeros({batch}, numbers())),
          offset(at::zeros({batch}, numbers())),
          table(at::zeros({batch, table}, numbers())),
          value(at::zeros({batch, heads, dimension}, half())),
          query(at::zeros({batch, heads, 1, dimension}, half())) {}

    // Slots written by the sequences.
    at::Tensor block, offset;
    // Blocks read by each sequence.
    at::Tensor table;
    at::Tensor value, query;
};

// Writes one token per sequence to every plane and attends over the blocks of its table. Equal
// contents give equal bits in any layout.
inline at::Tensor attend(const std::vector<at::Tensor>& planes, const StepInputs& in) {
    at::Tensor x = in.query;
    for (std::size_t plane = 0; plane + 1 < planes.size(); plane += 2) {
        const auto number = static_cast<double>(plane);
        auto keys = planes[plane], values = planes[plane + 1];
        keys.index_put_({in.block, in.offset}, in.value + number);
        values.index_put_({in.block, in.offset}, in.value - number);
        const auto gather = [&](const at::Tensor& from) {
            return from.index({in.table}).flatten(1, 2).transpose(1, 2);
        };
        const auto weights =
            at::softmax((x * gather(keys)).sum(-1, false, at::kFloat), -1).to(at::kBFloat16);
        x = x + (weights.unsqueeze(-1) * gather(values)).sum(-2, true);
        x = x / x.to(at::kFloat).pow(2).mean(-1, true).add(1e-3).sqrt().to(at::kBFloat16);
    }
    return x;
}

class Elastic : public Torch {
protected:
    void SetUp() override {
        Torch::SetUp();
        device_.emplace(Device::open());
    }

    PauseFence fence() const { return {{raw()}, {}}; }

    static at::Tensor upload(const std::vector<std::int64_t>& values) {
        return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(at::kCUDA);
    }

    std::optional<Device> device_;
};

class RoomyElastic : public Elastic {
protected:
    void SetUp() override {
        Elastic::SetUp();
        c10::cuda::CUDACachingAllocator::emptyCache();
        std::size_t free = 0, total = 0;
        ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
        if (static_cast<double>(free) < 24 * GiB) {
            GTEST_SKIP() << "SKIPPED: needs 24 GiB of free memory";
        }
    }
};

}  // namespace torch_tests
