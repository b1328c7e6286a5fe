#include "memory.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace xllm_example {
namespace {

using Clock = std::chrono::steady_clock;

double micros_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

}  // namespace

ServingMemory::ServingMemory(vmmgraph::torch::KvTensors& kv,
                             const vmmgraph::SharedVmmAllocator& arena,
                             const MemoryOptions& options)
    : kv_(kv),
      arena_(arena),
      options_(options),
      page_bytes_(kv.cache().memory().page_bytes),
      blocks_a_page_(kv.cache().stats().blocks_a_page),
      pool_(kv.cache()),
      ahead_(options.free_blocks, 1, options.residence),
      borrower_([this](const vmmgraph::Vacate& asked) { return vacate(asked); }) {
    if (blocks_a_page_ * kv.cache().stats().block_bytes != page_bytes_) {
        throw std::invalid_argument("a page of the cache is to hold whole blocks, of all planes");
    }
    kv.cache().set_budget(options.kv_bytes);
}

ServingMemory::~ServingMemory() {
    try {
        // No engine is left to ask. A lease ends when none of its blocks has memory.
        auto& cache = kv_.cache();
        cache.release({0, cache.stats().most_blocks}, fence());
        vmmgraph::recall(arena_, options_.deadline);
    } catch (...) {
        // The library logs a failure.
    }
}

vmmgraph::PauseFence ServingMemory::fence() const {
    return options_.stream == nullptr ? vmmgraph::PauseFence{}
                                      : vmmgraph::PauseFence{{options_.stream}};
}

std::uint64_t ServingMemory::own_room() const {
    const auto charged = kv_.cache().memory().charged_bytes;
    return charged < options_.kv_bytes ? (options_.kv_bytes - charged) / page_bytes_ : 0;
}

std::uint64_t ServingMemory::lendable() const {
    if (!options_.lending) {
        return 0;
    }
    const auto bytes = vmmgraph::lendable(arena_).first;
    return bytes > options_.arena_keeps ? (bytes - options_.arena_keeps) / page_bytes_ : 0;
}

void ServingMemory::step() {
    kv_.cache().reap();
    leases_.remove_if([](const vmmgraph::Lease& lease) { return lease.bytes() == 0; });
    const auto free = pool_.stats().available;
    const auto [action, count] = ahead_.step(steps_++, free, 0, std::exchange(granted_, 0));
    if (action == vmmgraph::Ahead::commit) {
        prepare(free + count);
    } else if (action == vmmgraph::Ahead::give_back) {
        give_back(free - std::min(free, count));
    }
}

void ServingMemory::give_back(std::uint64_t keep) {
    const auto surplus = pool_.surplus(keep);
    for (const auto range : surplus) {
        pool_.unback(range);
        kv_.cache().release(range, fence());
    }
}

void ServingMemory::gather(std::uint64_t free,
                           const std::function<void(const vmmgraph::EvictionRequest&)>& vacate) {
    const auto stats = pool_.stats();
    const auto pages_of = [&](std::uint64_t blocks) {
        return (blocks + blocks_a_page_ - 1) / blocks_a_page_;
    };
    const auto there = pages_of(stats.in_use + stats.available),
               needed = pages_of(stats.in_use + free);
    if (there <= needed) {
        return;
    }
    pool_.ask((there - needed) * page_bytes_, 0, {}, vacate);
    give_back(free);
}

void ServingMemory::prepare(std::uint64_t free, bool borrow) {
    if (pool_.stats().available >= free) {
        return;
    }
    const auto missing = pool_.shortfall(free);
    if (!missing) {
        return;
    }
    for (auto range : *missing) {
        while (range.first < range.end) {
            const auto own = own_room();
            const auto there = own > 0 ? own : borrow ? lendable() : 0;
            if (there == 0) {
                return;
            }
            const vmmgraph::BlockRange part{
                range.first, std::min(range.end, range.first + there * blocks_a_page_)};
            if (own == 0) {
                this->borrow(part);
            } else if (!commit(part)) {
                return;
            }
            kv_.before(options_.stream);
            pool_.back(part);
            range.first = part.end;
        }
    }
}

bool ServingMemory::commit(vmmgraph::BlockRange blocks) {
    try {
        kv_.commit(blocks);
        return true;
    } catch (const vmmgraph::OutOfMemory&) {
        return false;
    }
}

void ServingMemory::borrow(vmmgraph::BlockRange blocks) {
    const auto start = Clock::now();
    leases_.push_back(vmmgraph::lend(arena_, kv_.cache(), blocks, borrower_));
    stats_.lend_micros += micros_since(start);
    const auto bytes = leases_.back().bytes();
    ++stats_.leases;
    stats_.lent_bytes += bytes;
    stats_.most_lent_bytes = std::max(stats_.most_lent_bytes, vmmgraph::lendable(arena_).second);
}

std::optional<std::vector<std::uint64_t>> ServingMemory::allocate(std::size_t count, bool borrow) {
    prepare(count, borrow);
    auto blocks = pool_.allocate(count);
    granted_ += blocks ? count : 0;
    return blocks;
}

void ServingMemory::free(const std::vector<std::uint64_t>& blocks) { pool_.free(blocks); }

void ServingMemory::recall() {
    leases_.remove_if([](const vmmgraph::Lease& lease) { return lease.bytes() == 0; });
    if (leases_.empty()) {
        return;
    }
    giving_micros_ = 0;
    const auto start = Clock::now();
    vmmgraph::recall(arena_, options_.deadline);
    stats_.recall_micros += micros_since(start) - giving_micros_;
    ++stats_.recalls;
    leases_.clear();
}

std::optional<vmmgraph::Vacated> ServingMemory::vacate(const vmmgraph::Vacate& asked) {
    const auto start = Clock::now();
    pool_.ask_of(asked.blocks, asked.bytes, {}, [this](const vmmgraph::EvictionRequest& ask) {
        std::vector<std::uint64_t> blocks;
        for (std::size_t page = 0; page < ask.page_count; ++page) {
            blocks.insert(blocks.end(), ask.pages[page].blocks,
                          ask.pages[page].blocks + ask.pages[page].block_count);
        }
        give_up_(blocks);
    });
    vmmgraph::Vacated gone;
    gone.blocks = pool_.unused_of(asked.blocks);
    for (const auto range : gone.blocks) {
        pool_.unback(range);
    }
    gone.fence = fence();
    giving_micros_ += micros_since(start);
    return gone;
}

}  // namespace xllm_example
