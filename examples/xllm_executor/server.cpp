#include "server.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace xllm_example {

HostBlocks::HostBlocks(const vmmgraph::torch::KvTensors& kv, std::int64_t blocks, void* stream)
    : base_(reinterpret_cast<std::byte*>(kv.cache().plane(0).address)),
      stride_(kv.cache().plane(0).stride_bytes),
      block_bytes_(kv.cache().stats().block_bytes),
      stream_(stream),
      memory_(at::empty({blocks, static_cast<std::int64_t>(block_bytes_)},
                        at::TensorOptions().dtype(at::kByte).pinned_memory(stream != nullptr))),
      free_(static_cast<std::size_t>(blocks)) {
    std::iota(free_.rbegin(), free_.rend(), 0);
}

void HostBlocks::copy(void* to, const void* from) {
    bytes_ += block_bytes_;
    if (stream_ == nullptr) {
        std::memcpy(to, from, block_bytes_);
    } else {
        C10_CUDA_CHECK(cudaMemcpyAsync(to, from, block_bytes_, cudaMemcpyDefault,
                                       static_cast<cudaStream_t>(stream_)));
    }
}

std::int64_t HostBlocks::put(std::int32_t block) {
    if (free_.empty()) {
        throw std::runtime_error("no room on the host for another block");
    }
    const auto slot = free_.back();
    free_.pop_back();
    copy(memory_.data_ptr<std::uint8_t>() + static_cast<std::uint64_t>(slot) * block_bytes_,
         base_ + static_cast<std::uint64_t>(block) * stride_);
    return slot;
}

void HostBlocks::take(std::int64_t slot, std::int32_t block) {
    copy(base_ + static_cast<std::uint64_t>(block) * stride_,
         memory_.data_ptr<std::uint8_t>() + static_cast<std::uint64_t>(slot) * block_bytes_);
    // A later write to this slot is ordered after the copy on the stream.
    free_.push_back(slot);
}

void HostBlocks::move(std::int32_t from, std::int32_t to) {
    copy(base_ + static_cast<std::uint64_t>(to) * stride_,
         base_ + static_cast<std::uint64_t>(from) * stride_);
}

Server::Server(ServingMemory& memory, Engine engine, const ServerOptions& options)
    : memory_(memory),
      engine_(std::move(engine)),
      options_(options),
      host_(memory.kv(), options.host_blocks, memory.stream()) {
    memory_.on_recall([this](const std::vector<std::uint64_t>& blocks) {
        const std::unordered_set<std::uint64_t> wanted(blocks.begin(), blocks.end());
        const auto which = [&](std::int32_t block) {
            return wanted.count(static_cast<std::uint64_t>(block)) > 0;
        };
        for (auto* const entries : {&paused_, &running_}) {
            for (auto entry = entries->begin(); entry != entries->end();) {
                give_up(*entries, entry++, which);
            }
        }
    });
}

void Server::give_up(Entries& of, Entries::iterator entry,
                     const std::function<bool(std::int32_t)>& which) {
    auto& [sequence, saved] = *entry;
    std::vector<std::uint64_t> freed;
    for (std::size_t i = 0; i < sequence.blocks.size(); ++i) {
        auto& block = sequence.blocks[i];
        if (block < 0 || !which(block)) {
            continue;
        }
        // A block without a token has no contents to save.
        saved[i] = static_cast<std::int64_t>(i) * options_.block_size < sequence.in_cache
                       ? host_.put(block)
                       : -1;
        freed.push_back(static_cast<std::uint64_t>(block));
        block = -1;
    }
    if (freed.empty()) {
        return;
    }
    memory_.free(freed);
    if (&of == &running_) {
        ++stats_.paused;
        const auto behind =
            std::find_if(paused_.begin(), paused_.end(),
                         [id = sequence.id](const Entry& other) { return other.sequence.id > id; });
        paused_.splice(behind, running_, entry);
    }
}

bool Server::make_room(const Entry* besides) {
    for (auto* const entries : {&paused_, &running_}) {
        for (auto entry = entries->end(); entry != entries->begin();) {
            --entry;
            const auto& blocks = entry->sequence.blocks;
            if (&*entry != besides && std::any_of(blocks.begin(), blocks.end(),
                                                  [](std::int32_t block) { return block >= 0; })) {
                give_up(*entries, entry, [](std::int32_t) { return true; });
                return true;
            }
        }
    }
    return false;
}

void Server::resume() {
    const auto missing_of = [](const Entry& entry) {
        return static_cast<std::size_t>(std::count_if(entry.sequence.blocks.begin(),
                                                      entry.sequence.blocks.end(),
                                                      [](auto b) { return b < 0; }));
    };
    std::size_t all = 0;
    for (const auto& entry : paused_) {
        all += missing_of(entry);
    }
    if (all > 0) {
        // Use as few leases as possible.
        memory_.prepare(all);
    }
    while (!paused_.empty() && running_.size() < options_.most_sequences) {
        auto& entry = paused_.front();
        const auto blocks = memory_.allocate(missing_of(entry));
        if (!blocks) {
            // Running requests will end; waiting ones may hold the needed blocks.
            if (running_.empty() && make_room(&entry)) {
                continue;
            }
            return;
        }
        auto next = blocks->begin();
        for (std::size_t i = 0; i < entry.sequence.blocks.size(); ++i) {
            if (auto& block = entry.sequence.blocks[i]; block < 0) {
                block = static_cast<std::int32_t>(*next++);
                if (auto& slot = entry.saved[i]; slot >= 0) {
                    host_.take(std::exchange(slot, -1), block);
                }
            }
        }
        running_.splice(running_.end(), paused_, paused_.begin());
    }
}

void Server::admit() {
    for (std::size_t n = 0; n < options_.prefills_a_step && !waiting_.empty(); ++n) {
        const bool is_long = engine_.is_long(waiting_.front());
        // Paused requests come first, except before a long prompt, which would otherwise starve.
        if (running_.size() >= options_.most_sequences || (!is_long && !paused_.empty())) {
            return;
        }
        const auto count = static_cast<std::size_t>(
            (waiting_.front().wanted + options_.block_size - 1) / options_.block_size);
        if (is_long) {
            memory_.recall();
        }
        auto blocks = memory_.allocate(count, !is_long);
        while (!blocks && is_long && make_room(nullptr)) {
            blocks = memory_.allocate(count, false);
        }
        if (!blocks) {
            return;
        }
        Entries entries(1);
        auto& [sequence, saved] = entries.front();
        sequence.id = waiting_.front().id;
        sequence.tokens = std::move(waiting_.front().prompt);
        sequence.wanted = waiting_.front().wanted;
        sequence.blocks.assign(blocks->begin(), blocks->end());
        saved.assign(count, -1);
        waiting_.pop_front();
        const auto token = engine_.prefill(sequence);
        ++stats_.prefills;
        stats_.long_prefills += is_long;
        running_.splice(running_.end(), entries);
        finish_or_keep(running_, std::prev(running_.end()), token);
    }
}

void Server::finish_or_keep(Entries& from, Entries::iterator entry, std::int64_t token) {
    auto& sequence = entry->sequence;
    sequence.tokens.push_back(static_cast<std::int32_t>(token));
    if (static_cast<std::int64_t>(sequence.tokens.size()) < sequence.wanted) {
        return;
    }
    memory_.free({sequence.blocks.begin(), sequence.blocks.end()});
    done_.emplace(sequence.id, std::move(sequence.tokens));
    from.erase(entry);
}

void Server::decode() {
    std::vector<Sequence*> sequences;
    for (auto& entry : running_) {
        sequences.push_back(&entry.sequence);
    }
    const auto tokens = engine_.decode(sequences);
    stats_.decoded += tokens.size();
    stats_.most_at_once = std::max<std::uint64_t>(stats_.most_at_once, tokens.size());
    if (!waiting_.empty()) {
        ++stats_.full_steps;
        stats_.full_decoded += tokens.size();
    }
    auto entry = running_.begin();
    for (const auto token : tokens) {
        finish_or_keep(running_, entry++, token);
    }
}

void Server::gather() {
    memory_.gather(*options_.gather_but, [&](const vmmgraph::EvictionRequest& ask) {
        std::unordered_map<std::uint64_t, std::pair<Sequence*, std::size_t>> owners;
        for (auto& entry : running_) {
            for (std::size_t i = 0; i < entry.sequence.blocks.size(); ++i) {
                owners.emplace(entry.sequence.blocks[i], std::pair{&entry.sequence, i});
            }
        }
        const auto a_page = memory_.kv().cache().stats().blocks_a_page;
        std::unordered_set<std::uint64_t> asked;
        for (std::size_t page = 0; page < ask.page_count; ++page) {
            asked.insert(ask.pages[page].page);
        }
        for (std::size_t page = 0; page < ask.page_count; ++page) {
            const auto& candidate = ask.pages[page];
            for (std::size_t i = 0; i < candidate.block_count; ++i) {
                const auto from = candidate.blocks[i];
                const auto owner = owners.find(from);
                const auto to = owner == owners.end() ? std::nullopt : memory_.pool().allocate(1);
                if (!to) {
                    continue;
                }
                if (asked.count(to->front() / a_page) > 0) {
                    memory_.free(*to);
                    return;
                }
                const auto [sequence, index] = owner->second;
                host_.move(static_cast<std::int32_t>(from),
                           sequence->blocks[index] = static_cast<std::int32_t>(to->front()));
                memory_.free({from});
                ++stats_.moved;
            }
        }
    });
}

bool Server::step() {
    if (waiting_.empty() && paused_.empty() && running_.empty()) {
        return false;
    }
    memory_.step();
    resume();
    const auto waiting = waiting_.size();
    admit();
    if (running_.empty() && waiting_.size() == waiting) {
        throw std::runtime_error("a request needs more memory than there is");
    }
    if (options_.gather_but && waiting_.empty() && paused_.empty()) {
        gather();
    }
    if (!running_.empty()) {
        decode();
    }
    ++stats_.steps;
    return true;
}

}  // namespace xllm_example
