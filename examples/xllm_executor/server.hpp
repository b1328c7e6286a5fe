// Serving from a ServingMemory: requests wait, are prefilled one by one and decoded together.
// Requests move to host memory if their blocks are needed elsewhere. The `Engine` runs the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "batch.hpp"
#include "memory.hpp"

namespace xllm_example {

struct Request {
    std::uint64_t id = 0;
    std::vector<std::int32_t> prompt;
    // Final number of tokens, including the prompt.
    std::int64_t wanted = 0;
};

class HostBlocks {
public:
    // Memory for `blocks` blocks of a cache laid out by block; registered with the device if there
    // is one.
    HostBlocks(const vmmgraph::torch::KvTensors& kv, std::int64_t blocks, void* stream);

    // Copies a block to the host after the stream's current work. Returns its slot.
    [[nodiscard]] std::int64_t put(std::int32_t block);
    // Copies a slot back, to any block.
    void take(std::int64_t slot, std::int32_t block);
    // Copies a block on the device.
    void move(std::int32_t from, std::int32_t to);
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

private:
    void copy(void* to, const void* from);

    std::byte* base_;
    std::uint64_t stride_;
    std::uint64_t block_bytes_;
    void* stream_;
    at::Tensor memory_;
    std::vector<std::int64_t> free_;
    std::uint64_t bytes_ = 0;
};

struct ServerOptions {
    std::int64_t block_size = 16;
    std::size_t most_sequences = 64;
    std::size_t prefills_a_step = 4;
    std::int64_t host_blocks = 1024;
    // While no request waits, compacts blocks and releases all free ones except this many; nullopt:
    // never.
    std::optional<std::uint64_t> gather_but = std::nullopt;
};

struct ServerStats {
    std::uint64_t steps = 0;
    // Decoded tokens, and the maximum sequences of a step.
    std::uint64_t decoded = 0;
    std::uint64_t most_at_once = 0;
    // The same for steps with requests waiting for room.
    std::uint64_t full_steps = 0;
    std::uint64_t full_decoded = 0;
    std::uint64_t prefills = 0;
    std::uint64_t long_prefills = 0;
    std::uint64_t paused = 0;
    std::uint64_t moved = 0;
};

class Server {
public:
    struct Engine {
        // Computes a prompt into its blocks. Returns its next token.
        std::function<std::int64_t(Sequence&)> prefill;
        // Returns the next token of each sequence.
        std::function<std::vector<std::int64_t>(const std::vector<Sequence*>&)> decode;
        // Returns true if a prompt's activations exceed the memory never lent.
        std::function<bool(const Request&)> is_long;
    };

    // `memory` must outlive the server.
    Server(ServingMemory& memory, Engine engine, const ServerOptions& options);
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server() { memory_.on_recall({}); }

    void submit(Request request) { waiting_.push_back(std::move(request)); }
    // Runs one step; false if no work is left. Throws std::runtime_error if a request needs more
    // memory than exists.
    bool step();

    // Tokens of finished requests, by request id.
    [[nodiscard]] const std::map<std::uint64_t, std::vector<std::int32_t>>& done() const noexcept {
        return done_;
    }
    [[nodiscard]] const ServerStats& stats() const noexcept { return stats_; }
    [[nodiscard]] std::uint64_t host_bytes() const noexcept { return host_.bytes(); }
    // Number of sequences after their prefill and not finished.
    [[nodiscard]] std::size_t under_way() const noexcept {
        return running_.size() + paused_.size();
    }
    [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }

private:
    struct Entry {
        Sequence sequence;
        // Host slot of each block saved on the host; negative for other blocks.
        std::vector<std::int64_t> saved;
    };
    using Entries = std::list<Entry>;

    void resume();
    void admit();
    void decode();
    void gather();
    void finish_or_keep(Entries& from, Entries::iterator entry, std::int64_t token);
    // Moves some blocks of a sequence to the host; the sequence waits for their return.
    void give_up(Entries& of, Entries::iterator entry,
                 const std::function<bool(std::int32_t)>& which);
    // Takes all blocks of the last request, except `besides`. Returns false if none has blocks.
    bool make_room(const Entry* besides);

    ServingMemory& memory_;
    Engine engine_;
    ServerOptions options_;
    HostBlocks host_;
    std::deque<Request> waiting_;
    Entries running_;
    Entries paused_;
    std::map<std::uint64_t, std::vector<std::int32_t>> done_;
    ServerStats stats_;
};

}  // namespace xllm_example
