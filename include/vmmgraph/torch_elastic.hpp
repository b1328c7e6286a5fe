// VmmGraph for libtorch: a KV cache as tensors, which grows and shrinks while captured graphs stay valid. Link VmmGraph::torch.
//
//   vmmgraph::torch::KvTensors kv(device, {std::vector(72, vmmgraph::torch::KvPlane{{16, 8, 128}, at::kBFloat16}), 100'000});
//   kv.grow_to(2'000);
//   auto graph = vmmgraph::torch::capture(arena, stream, [&] { decode(kv.planes(), block_table, ...); });
//   graph.replay(stream);
//   kv.grow_to(4'000);                                       // or kv.cache().grow_async(), ahead of need
//   kv.before(stream);
//   graph.replay(stream);                                    // the same graph: block tables may name the new blocks
//
// Blocks may lie on pages that an arena lends (lease.hpp), where the cache's pages are as long as the arena's large ones:
//
//   auto lease = vmmgraph::lend(arena, kv.cache(), {4'000, 6'000}, engine);
//   kv.before(stream);                                       // behind the graphs that used them
//   ...                                                      // steps whose block tables name them
//   lease.recall(deadline);                                  // between two steps, before a graph or an EagerScope that needs the pages

#ifndef VMMGRAPH_TORCH_ELASTIC_HPP
#define VMMGRAPH_TORCH_ELASTIC_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "elastic.hpp"

namespace vmmgraph::torch {

// A plane of a KV cache: a layer's keys, a layer's values, their scales.
struct KvPlane {
    // The shape of one block, such as {tokens, heads, dimension}.
    std::vector<std::int64_t> block;
    at::ScalarType dtype = at::kBFloat16;
};

// How to make a KV cache of tensors.
struct KvTensorOptions {
    std::vector<KvPlane> planes;
    // The most blocks there may ever be: addresses for them are reserved.
    std::uint64_t blocks_most = 0;
    KvLayout layout = KvLayout::by_plane;
    // Name, pages, budget.
    ElasticOptions memory = {};
};

// A KV cache of which each plane is one tensor over all the addresses that are reserved for it, whose first dimension is the block. Only
// the blocks that are committed have memory: what touches another one faults on a GPU and ends the process on the host driver, so whole planes
// are never read, copied or filled. Addresses never change, so graphs captured over the tensors stay valid however the cache grows and
// shrinks. During a capture, kernels may use blocks that have no memory yet; copies (copy_ between contiguous tensors) may not.
//
// Tensors by_block have strides; they are contiguous within a block.
//
// The tensors, and all views of them, own the cache: it stays until the last one and this object are gone. Its memory then goes behind
// what was given to the default stream, torch's current one, and the streams of before() and record_stream(); these exist until then, and a
// graph's replays count by the stream that they are on. Torch's Tensor::record_stream() and torch's statistics do not know these tensors.
//
// Thread-safe but for moving and destroying. On a device of the host driver the tensors are on the CPU.
class VMMGRAPH_API KvTensors {
public:
    // Without memory yet. Throws Error: VMMGRAPH_ERROR_INVALID_ARGUMENT for a shape that is none or a plane whose blocks would not be
    // aligned for its type; otherwise as KvCache, and for another release of torch than built_for().
    KvTensors(const Device& device, const KvTensorOptions& options);
    KvTensors(KvTensors&& other) noexcept;
    KvTensors& operator=(KvTensors&& other) noexcept;
    ~KvTensors();

    // One tensor a plane, of shape {blocks_most, ...the shape of a block}.
    [[nodiscard]] const std::vector<at::Tensor>& planes() const noexcept;

    // The cache: its size, its limits, commits ahead of need, releases and statistics.
    [[nodiscard]] KvCache& cache() const noexcept;

    // As KvCache::grow_to() and commit(), but empties torch's cache before there is no memory. Throws OutOfMemory.
    Committed grow_to(std::uint64_t blocks);
    Committed commit(BlockRange blocks);

    // Makes later work of a stream wait for what may still use blocks that were committed again before they went, and notes that the stream
    // uses the tensors. To be called for each stream that uses them, after each commit. Throws while the stream is under capture.
    void before(void* stream);

    // Notes only that a stream uses the tensors: for the end of the last one. Any time.
    void record_stream(void* stream);

private:
    struct State;
    std::shared_ptr<State> state_;
    std::vector<at::Tensor> planes_;
};

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_ELASTIC_HPP
