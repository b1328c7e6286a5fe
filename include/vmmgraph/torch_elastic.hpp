// VmmGraph for libtorch: a KV cache as tensors, which grows and shrinks while captured graphs stay
// valid. Link VmmGraph::torch.
//
//   using namespace vmmgraph::torch;
//   KvTensors kv(device, {std::vector(72, KvPlane{{16, 8, 128}, at::kBFloat16}), 100'000});
//   kv.grow_to(2'000);
//   auto graph = capture(arena, stream, [&] { decode(kv.planes(), block_table, ...); });
//   graph.replay(stream);
//   kv.grow_to(4'000);                     // or kv.cache().grow_async(), ahead of need
//   kv.before(stream);
//   graph.replay(stream);                  // the same graph: block tables may name the new blocks
//
// Blocks may lie on pages lent by an arena (lease.hpp), if the cache's pages are as long as the
// arena's large pages:
//
//   auto lease = vmmgraph::lend(arena, kv.cache(), {4'000, 6'000}, engine);
//   kv.before(stream);                     // wait for the graphs which used the pages
//   ...                                    // steps with these blocks in their block tables
//   lease.recall(deadline);                // before a graph or EagerScope which needs the pages

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

// A plane of a KV cache: a layer's keys, values or scales.
struct KvPlane {
    // The shape of one block, such as {tokens, heads, dimension}.
    std::vector<std::int64_t> block;
    at::ScalarType dtype = at::kBFloat16;
};

// Options of a KV cache of tensors.
struct KvTensorOptions {
    std::vector<KvPlane> planes;
    // Maximum number of blocks, for which addresses are reserved.
    std::uint64_t blocks_most = 0;
    KvLayout layout = KvLayout::by_plane;
    // Name, pages, budget.
    ElasticOptions memory = {};
};

// A KV cache of tensors: each plane is one tensor over all its reserved addresses, whose first
// dimension is the block. Only committed blocks have memory: touching another one faults on a GPU
// and ends the process on the host driver, so never read, copy or fill a whole plane. Addresses
// never change, so captured graphs stay valid. During a capture, kernels may use blocks without
// memory; copies (copy_ between contiguous tensors) may not.
//
// Tensors by_block are strided, and contiguous within a block.
//
// The tensors and their views own the cache, which ends with the last one and this object. Its
// memory is unmapped after the work of the default stream, torch's current stream, and the streams
// of before() and record_stream(), which must exist until then; a graph's replay counts for its
// stream. Torch's Tensor::record_stream() and statistics do not cover these tensors.
//
// Thread-safe, except moving and destroying. With the host driver, the tensors are on the CPU.
class VMMGRAPH_API KvTensors {
public:
    // Reserves addresses without memory. Throws Error (VMMGRAPH_ERROR_INVALID_ARGUMENT) for an
    // invalid shape or blocks misaligned for their type; for another torch release than
    // built_for(); otherwise as KvCache.
    KvTensors(const Device& device, const KvTensorOptions& options);
    KvTensors(KvTensors&& other) noexcept;
    KvTensors& operator=(KvTensors&& other) noexcept;
    ~KvTensors();

    // One tensor per plane, of shape {blocks_most, ...the shape of a block}.
    [[nodiscard]] const std::vector<at::Tensor>& planes() const noexcept;

    // The cache: its size, limits, asynchronous commits, releases and statistics.
    [[nodiscard]] KvCache& cache() const noexcept;

    // As KvCache::grow_to() and commit(), but empty torch's cache before throwing OutOfMemory.
    Committed grow_to(std::uint64_t blocks);
    Committed commit(BlockRange blocks);

    // Makes later work of a stream wait for earlier users of recommitted blocks, and records the
    // stream as a user. Call for each user stream after each commit. Throws while the stream is
    // under capture.
    void before(void* stream);

    // Only records a user stream, for the final unmap. Any time.
    void record_stream(void* stream);

private:
    struct State;
    std::shared_ptr<State> state_;
    std::vector<at::Tensor> planes_;
};

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_ELASTIC_HPP
