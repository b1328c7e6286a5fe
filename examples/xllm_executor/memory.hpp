// The memory of an engine that serves under one budget. Activations of graphs and of eager prefills are an arena's; a KV cache has pages of its
// own, and on lease those of the arena that only long prompts need, as long as none of them is being prefilled.
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
    // The most bytes of its own pages that the cache has.
    std::uint64_t kv_bytes = 0;
    // Bytes of the arena that the graphs of every step need: never borrowed.
    std::uint64_t arena_keeps = 0;
    bool lending = true;
    // Blocks that are to be free before each step, and for how many steps there must be too many before some go.
    vmmgraph::Watermarks free_blocks;
    std::uint64_t residence = 1'000;
    // How long a recall may take.
    std::chrono::microseconds deadline = std::chrono::seconds(10);
    // What all work on the blocks is given to; null on a CPU.
    void* stream = nullptr;
};

// What it did so far.
struct MemoryStats {
    std::uint64_t leases = 0;
    std::uint64_t recalls = 0;
    std::uint64_t lent_bytes = 0;
    std::uint64_t most_lent_bytes = 0;
    // Host time of both, the engine's own work (copies) left out of the second.
    double lend_micros = 0;
    double recall_micros = 0;
};

class ServingMemory {
public:
    // Stops using these blocks, and frees them.
    using GiveUp = std::function<void(const std::vector<std::uint64_t>& blocks)>;

    // Pages of the cache are as long as the arena's large ones and hold whole blocks; the cache lies by block.
    ServingMemory(vmmgraph::torch::KvTensors& kv, const vmmgraph::SharedVmmAllocator& arena, const MemoryOptions& options);
    ~ServingMemory();
    ServingMemory(const ServingMemory&) = delete;
    ServingMemory& operator=(const ServingMemory&) = delete;

    // Who is asked for blocks at a recall; on the thread that recalls.
    void on_recall(GiveUp give_up) { give_up_ = std::move(give_up); }
    // A step begins: commits, borrows or gives back as the policy says.
    void step();
    // Backs more blocks, until so many are free: its own pages first, then borrowed ones. As many as there are.
    void prepare(std::uint64_t free, bool borrow = true);
    // So many blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate(std::size_t count, bool borrow = true);
    void free(const std::vector<std::uint64_t>& blocks);
    // Where blocks in use would fill fewer pages than they lie on: asks for the blocks of the emptiest, to be moved or given up by `vacate`, and
    // gives all pages back but those that so many free blocks more take.
    void gather(std::uint64_t free, const std::function<void(const vmmgraph::EvictionRequest&)>& vacate);
    // Gives all back that is borrowed: a long prompt needs the activations. At the boundary of two steps.
    void recall();

    [[nodiscard]] vmmgraph::torch::KvTensors& kv() noexcept { return kv_; }
    [[nodiscard]] vmmgraph::BlockPool& pool() noexcept { return pool_; }
    [[nodiscard]] const MemoryStats& stats() const noexcept { return stats_; }
    [[nodiscard]] void* stream() const noexcept { return options_.stream; }

private:
    [[nodiscard]] vmmgraph::PauseFence fence() const;
    void give_back(std::uint64_t keep);
    // Pages that could come just now.
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
