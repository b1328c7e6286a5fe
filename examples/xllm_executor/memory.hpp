// Memory of a serving engine under one budget. An arena has the activations of graphs and eager
// prefills. A KV cache has its own pages, and leases pages of the arena while no long prompt is
// prefilled.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include <vmmgraph/blocks.hpp>
#include <vmmgraph/lease.hpp>
#include <vmmgraph/policies.hpp>
#include <vmmgraph/torch_elastic.hpp>

namespace xllm_example {

struct MemoryOptions {
    // Maximum bytes of the cache's own pages.
    std::uint64_t kv_bytes = 0;
    // Arena bytes needed by the graphs of every step: never borrowed.
    std::uint64_t arena_keeps = 0;
    bool lending = true;
    // Watermarks of free blocks before each step, and the steps a surplus must last before blocks
    // are released.
    vmmgraph::Watermarks free_blocks;
    std::uint64_t residence = 1'000;
    std::chrono::microseconds deadline = std::chrono::seconds(10);
    // Stream of all work on the blocks; null on a CPU.
    void* stream = nullptr;
};

struct MemoryStats {
    std::uint64_t leases = 0;
    std::uint64_t recalls = 0;
    std::uint64_t lent_bytes = 0;
    std::uint64_t most_lent_bytes = 0;
    // Host time of lending and of recalls; recalls exclude the engine's copies.
    double lend_micros = 0;
    double recall_micros = 0;
};

class ServingMemory {
public:
    using GiveUp = std::function<void(const std::vector<std::uint64_t>& blocks)>;

    // The cache must be laid out by block, with pages of the arena's large page size and of whole
    // blocks.
    ServingMemory(vmmgraph::torch::KvTensors& kv, const vmmgraph::SharedVmmAllocator& arena,
                  const MemoryOptions& options);
    ~ServingMemory();
    ServingMemory(const ServingMemory&) = delete;
    ServingMemory& operator=(const ServingMemory&) = delete;

    // Sets the callback that gives up blocks at a recall, on the recalling thread.
    void on_recall(GiveUp give_up) { give_up_ = std::move(give_up); }
    // Call at the beginning of a step: commits, borrows or returns pages by policy.
    void step();
    // Backs blocks until `free` are free or memory runs out: own pages first, then borrowed ones.
    void prepare(std::uint64_t free, bool borrow = true);
    // Returns `count` blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate(std::size_t count,
                                                                     bool borrow = true);
    void free(const std::vector<std::uint64_t>& blocks);
    // Compacts blocks: asks `vacate` to move or give up blocks of the emptiest pages, then returns
    // all pages except those for `free` free blocks.
    void gather(std::uint64_t free,
                const std::function<void(const vmmgraph::EvictionRequest&)>& vacate);
    // Returns all borrowed pages, because a long prompt needs the activations. Call between two
    // steps.
    void recall();

    [[nodiscard]] vmmgraph::torch::KvTensors& kv() noexcept { return kv_; }
    [[nodiscard]] vmmgraph::BlockPool& pool() noexcept { return pool_; }
    [[nodiscard]] const MemoryStats& stats() const noexcept { return stats_; }
    [[nodiscard]] void* stream() const noexcept { return options_.stream; }

private:
    [[nodiscard]] vmmgraph::PauseFence fence() const;
    void give_back(std::uint64_t keep);
    // Pages that could be added now.
    [[nodiscard]] std::uint64_t own_room() const;
    [[nodiscard]] std::uint64_t lendable() const;
    bool commit(vmmgraph::BlockRange blocks);
    void borrow(vmmgraph::BlockRange blocks);
    [[nodiscard]] std::optional<vmmgraph::Vacated> vacate(const vmmgraph::Vacate& asked);

    vmmgraph::torch::KvTensors& kv_;
    const vmmgraph::SharedVmmAllocator& arena_;
    MemoryOptions options_;
    std::uint64_t page_bytes_;
    std::uint64_t blocks_a_page_;
    vmmgraph::BlockPool pool_;
    vmmgraph::PreCommit ahead_;
    std::uint64_t steps_ = 0;
    std::uint64_t granted_ = 0;
    GiveUp give_up_;
    double giving_micros_ = 0;
    MemoryStats stats_;
    vmmgraph::Borrower borrower_;
    std::list<vmmgraph::Lease> leases_;
};

}  // namespace xllm_example
