// Serving from a ServingMemory: requests wait, are prefilled one by one, are decoded together, and step aside to host memory where their blocks
// are needed for something else. Which model runs, and how, is the engine's.
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
    // How many tokens it is to have, the prompt's among them.
    std::int64_t wanted = 0;
};

// Blocks that wait on the host.
class HostBlocks {
public:
    // Room for so many blocks of a cache by block; registered with the device where there is one.
    HostBlocks(const vmmgraph::torch::KvTensors& kv, std::int64_t blocks, void* stream);

    // Copies a block there, behind the stream's work so far; where it is.
    [[nodiscard]] std::int64_t put(std::int32_t block);
    // Copies it back, to another block.
    void take(std::int64_t slot, std::int32_t block);
    // Copies a block to another one, on the device.
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
    // Prompts that are prefilled in one step, at most.
    std::size_t prefills_a_step = 4;
    // Blocks that may wait on the host.
    std::int64_t host_blocks = 1024;
    // While no request waits, blocks move to where they fill whole pages, but for so many free ones; none: they stay.
    std::optional<std::uint64_t> gather_but = std::nullopt;
};

struct ServerStats {
    std::uint64_t steps = 0;
    // Tokens of decodes, and sequences of the step that had the most.
    std::uint64_t decoded = 0;
    std::uint64_t most_at_once = 0;
    // The same of the steps with requests left to wait for room.
    std::uint64_t full_steps = 0;
    std::uint64_t full_decoded = 0;
    std::uint64_t prefills = 0;
    std::uint64_t long_prefills = 0;
    // How often a sequence stepped aside.
    std::uint64_t paused = 0;
    // Blocks that moved on the device.
    std::uint64_t moved = 0;
};

class Server {
public:
    struct Engine {
        // Computes a prompt into its blocks, and its next token.
        std::function<std::int64_t(Sequence&)> prefill;
        // The next token of each.
        std::function<std::vector<std::int64_t>(const std::vector<Sequence*>&)> decode;
        // Whether a prompt's activations are more than what is never lent.
        std::function<bool(const Request&)> is_long;
    };

    // The memory must outlive it.
    Server(ServingMemory& memory, Engine engine, const ServerOptions& options);
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server() { memory_.on_recall({}); }

    void submit(Request request) { waiting_.push_back(std::move(request)); }
    // One step of the engine; false if there is nothing left to do. Throws std::runtime_error if a request needs more than there is.
    bool step();

    // The tokens of the requests that are done, by number.
    [[nodiscard]] const std::map<std::uint64_t, std::vector<std::int32_t>>& done() const noexcept { return done_; }
    [[nodiscard]] const ServerStats& stats() const noexcept { return stats_; }
    [[nodiscard]] std::uint64_t host_bytes() const noexcept { return host_.bytes(); }
    // Sequences that are neither done nor wait for their prefill.
    [[nodiscard]] std::size_t under_way() const noexcept { return running_.size() + paused_.size(); }
    [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }

private:
    struct Entry {
        Sequence sequence;
        // Where on the host the blocks are that have contents and are not on the device; else below 0.
        std::vector<std::int64_t> saved;
    };
    using Entries = std::list<Entry>;

    void resume();
    void admit();
    void decode();
    void gather();
    void finish_or_keep(Entries& from, Entries::iterator entry, std::int64_t token);
    // Some blocks of a sequence go to the host, and the sequence waits for them to come back.
    void give_up(Entries& of, Entries::iterator entry, const std::function<bool(std::int32_t)>& which);
    // The last to come gives all up that it has; whether there was one, beside the one that it is for.
    bool make_room(const Entry* besides);

    ServingMemory& memory_;
    Engine engine_;
    ServerOptions options_;
    HostBlocks host_;
    std::deque<Request> waiting_;
    Entries running_;
    // By number, the first to come first.
    Entries paused_;
    std::map<std::uint64_t, std::vector<std::int32_t>> done_;
    ServerStats stats_;
};

}  // namespace xllm_example
