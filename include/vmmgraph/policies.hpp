// Who gets memory, and when, for C++17: decisions over pages, blocks and steps, without memory, a clock or a thread. An engine's scheduler
// asks them, and acts by BlockPool (blocks.hpp), KvCache (elastic.hpp) and leases (lease.hpp). Header-only over vmmgraph.h; conventions as in
// vmmgraph.hpp. All are thread-safe. docs/elastic.md shows what they do for traffic; examples/cpp/schedule.cpp is a scheduler of them.
//
//   PreCommit     commit ahead of need between two watermarks, give back late
//   Standing      how much of what steps used stays, though none uses it now
//   Grants        a step's KV memory and activations: both or neither
//   admission_peak, Lengths     whether one more sequence will fit until it ends
//   in_turn       whose turn it is, so that most are in time
//   prefill_waits, to_host      whether prompts wait for those that decode, and for room
//   HostKv, SloControl          KV of prompts that wait in host memory, and how much of it there may be

#ifndef VMMGRAPH_POLICIES_HPP
#define VMMGRAPH_POLICIES_HPP

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base.hpp"

namespace vmmgraph {

// What to do before a step.
enum class Ahead : std::int32_t {
    nothing = VMMGRAPH_AHEAD_NOTHING,
    // Commit so many more blocks.
    commit = VMMGRAPH_AHEAD_COMMIT,
    // Give the memory of so many free blocks back.
    give_back = VMMGRAPH_AHEAD_GIVE_BACK,
};

// How many free blocks there are to be: with fewer than `low` more are committed, as many as make `high`; what is beyond is given back.
struct Watermarks {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
};

// When to commit ahead of need, and when to give back. It has no clock and no thread.
class PreCommit {
public:
    // Demand that was seen lately is added to both marks for `lead` steps, which is how long a commit may take; there must be too much for
    // `residence` steps before some goes.
    PreCommit(Watermarks marks, std::uint64_t lead, std::uint64_t residence) {
        detail::require_abi();
        vmmgraph_pre_commit_t handle = nullptr;
        detail::check(vmmgraph_pre_commit_create(marks.low, marks.high, lead, residence, &handle));
        handle_ = detail::Owned<vmmgraph_pre_commit_t, vmmgraph_pre_commit_destroy>(handle);
    }

    // Before step number `step`, which never falls: `free` blocks are backed and unused, `coming` are being committed, and `granted` were
    // handed out since the last call. What to do, for how many blocks.
    [[nodiscard]] std::pair<Ahead, std::uint64_t> step(std::uint64_t step, std::uint64_t free, std::uint64_t coming,
                                                       std::uint64_t granted) {
        std::int32_t action = 0;
        std::uint64_t blocks = 0;
        detail::check(vmmgraph_pre_commit_step(handle(), step, free, coming, granted, &action, &blocks));
        return {static_cast<Ahead>(action), blocks};
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_pre_commit_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_pre_commit_t, vmmgraph_pre_commit_destroy> handle_;
};

// How much of memory that comes and goes with steps is to stay mapped between them: the most that one of the last steps used. Amounts are in any
// unit.
class Standing {
public:
    // `residence`: for how many steps it stays. What is less than one in `gap` parts too much stays too; throws for 0.
    Standing(std::uint64_t residence, std::uint64_t gap) {
        detail::require_abi();
        vmmgraph_standing_t handle = nullptr;
        detail::check(vmmgraph_standing_create(residence, gap, &handle));
        handle_ = detail::Owned<vmmgraph_standing_t, vmmgraph_standing_destroy>(handle);
    }

    // Step number `step`, which never falls, uses so much.
    void used(std::uint64_t step, std::uint64_t amount) { detail::check(vmmgraph_standing_used(handle(), step, amount)); }

    // How much is to stay at a step.
    [[nodiscard]] std::uint64_t wanted(std::uint64_t step) {
        std::uint64_t amount = 0;
        detail::check(vmmgraph_standing_at(handle(), step, 0, &amount, nullptr));
        return amount;
    }

    // How much of `held` may be given back at a step; 0: nothing.
    [[nodiscard]] std::uint64_t too_much(std::uint64_t step, std::uint64_t held) {
        std::uint64_t amount = 0;
        detail::check(vmmgraph_standing_at(handle(), step, held, nullptr, &amount));
        return amount;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_standing_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_standing_t, vmmgraph_standing_destroy> handle_;
};

// What became of an ask.
enum class Grant : std::int32_t {
    // Both are the step's now.
    granted = VMMGRAPH_GRANT_GRANTED,
    // Neither; it keeps its place, and is to ask again when something came back.
    not_now = VMMGRAPH_GRANT_NOT_NOW,
    // There are not so many pages, and it waits no more.
    never = VMMGRAPH_GRANT_NEVER,
};

// What a step needs beside what it holds, in pages.
struct Need {
    // For KV: held until its sequences end.
    std::uint64_t kv = 0;
    // For activations: held until the step ends.
    std::uint64_t activations = 0;
};

// What was granted.
using GrantsStats = vmmgraph_grants_stats_t;

// One number of pages for the KV memory and the activations of all steps under way. A step gets both or neither, so steps never hold what each
// other wait for. Who has to wait is overtaken by a bounded number of others, those that fit beside it left out.
class Grants {
public:
    // `pages` in all; who waits is overtaken `overtakes` times at most.
    Grants(std::uint64_t pages, std::uint64_t overtakes) {
        detail::require_abi();
        vmmgraph_grants_t handle = nullptr;
        detail::check(vmmgraph_grants_create(pages, overtakes, &handle));
        handle_ = detail::Owned<vmmgraph_grants_t, vmmgraph_grants_destroy>(handle);
    }

    // So many pages in all from now on. What was granted beyond them stays granted until it is given back.
    void set_pages(std::uint64_t pages) { detail::check(vmmgraph_grants_set_pages(handle(), pages)); }

    // Step `who`, a number of the caller's, asks. One that waits may ask for something else than before.
    [[nodiscard]] Grant ask(std::uint64_t who, Need need) {
        std::int32_t answer = 0;
        detail::check(vmmgraph_grants_ask(handle(), who, need.kv, need.activations, &answer));
        return static_cast<Grant>(answer);
    }

    // Takes so many KV pages for a step under way that cannot go on without, past everybody who waits; whether there were.
    [[nodiscard]] bool extend(std::uint64_t kv) {
        std::int32_t there = 0;
        detail::check(vmmgraph_grants_extend(handle(), kv, &there));
        return there != 0;
    }

    // Who waited does so no more.
    void forget(std::uint64_t who) { detail::check(vmmgraph_grants_forget(handle(), who)); }

    // What came back: the activations of a step that ended, the KV pages of sequences that did; at most what was granted.
    void give(Need back) { detail::check(vmmgraph_grants_give(handle(), back.kv, back.activations)); }

    // What is granted now.
    [[nodiscard]] GrantsStats stats() const {
        auto stats = detail::sized<GrantsStats>();
        detail::check(vmmgraph_grants_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_grants_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_grants_t, vmmgraph_grants_destroy> handle_;
};

// A sequence that grows by a token a step: tokens that it holds memory for, and those still to come, known or predicted.
using Growing = vmmgraph_growing_t;

// The most blocks of `block_tokens` tokens that these sequences will ever hold together, at most one too many for each. One more may begin if,
// among these, they stay within what there is: then those that run are not preempted for those that came later. Throws for blocks of no tokens.
[[nodiscard]] inline std::uint64_t admission_peak(std::uint64_t block_tokens, const std::vector<Growing>& sequences) {
    detail::require_abi();
    std::uint64_t blocks = 0;
    detail::check(vmmgraph_admission_peak(block_tokens, sequences.data(), sequences.size(), &blocks));
    return blocks;
}

// Predicts how many tokens a sequence will have generated when it ends, by the last ones that ended and became longer than it is already.
class Lengths {
public:
    // Remembers `window` of them, says what `per_mille` of 1000 do not exceed, and `first` more tokens where none was as long. Throws for an
    // empty window, and above 1000.
    Lengths(std::size_t window, std::uint64_t per_mille, std::uint64_t first) {
        detail::require_abi();
        vmmgraph_lengths_t handle = nullptr;
        detail::check(vmmgraph_lengths_create(window, per_mille, first, &handle));
        handle_ = detail::Owned<vmmgraph_lengths_t, vmmgraph_lengths_destroy>(handle);
    }

    // A sequence ended with so many tokens generated.
    void ended(std::uint64_t tokens) { detail::check(vmmgraph_lengths_ended(handle(), tokens)); }

    // How many one that has so many already will have.
    [[nodiscard]] std::uint64_t total(std::uint64_t generated) const {
        std::uint64_t tokens = 0;
        detail::check(vmmgraph_lengths_total(handle(), generated, &tokens));
        return tokens;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_lengths_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_lengths_t, vmmgraph_lengths_destroy> handle_;
};

// What waits for its turn: when it is to be over, how long it takes, and when it is first, in time or not. In any unit.
using Due = vmmgraph_due_t;

// Positions of what waits, in the order in which most are over in time if they are served one after the other.
struct Turns {
    std::vector<std::size_t> order;
    // How many of them, the first, are what has run out of patience or will be in time.
    std::size_t timely = 0;
};

// First what has run out of patience, oldest first; then what will be in time from `now` on, by when it is due; then the rest, by patience. Where
// not all can be in time, the longest are left for later.
[[nodiscard]] inline Turns in_turn(std::uint64_t now, const std::vector<Due>& all) {
    detail::require_abi();
    Turns turns{std::vector<std::size_t>(all.size()), 0};
    detail::check(vmmgraph_in_turn(now, all.data(), all.size(), turns.order.data(), &turns.timely));
    return turns;
}

// A prompt that waits to begin: when it came, when its first token is due, how long that takes, and when it begins whoever is late by that. In any
// unit.
using Prompt = vmmgraph_prompt_t;

// A sequence that decodes: when it had its first token, how many it has, and how long each may take on average.
using Decoding = vmmgraph_decoding_t;

// Whether a prompt's KV memory is rather to go to the host than to be waited for: half of the time for which it may wait is over.
[[nodiscard]] inline bool to_host(std::uint64_t now, const Prompt& prompt) {
    detail::require_abi();
    std::int32_t goes = 0;
    detail::check(vmmgraph_prompt_to_host(now, &prompt, &goes));
    return goes != 0;
}

// Whether a prefill of these prompts that takes so long is to wait for another step of those that decode: behind it more than three in ten of
// them would be late, and none of the prompts has a tenth or less of its time to wait left, or no patience.
[[nodiscard]] inline bool prefill_waits(std::uint64_t now, std::uint64_t takes, const std::vector<Prompt>& prompts,
                                        const std::vector<Decoding>& decoding) {
    detail::require_abi();
    std::int32_t waits = 0;
    detail::check(vmmgraph_prefill_waits(now, takes, prompts.data(), prompts.size(), decoding.data(), decoding.size(), &waits));
    return waits != 0;
}

// What KV on the host takes.
using HostKvStats = vmmgraph_host_kv_stats_t;

// How much host memory the KV of waiting sequences may have, and has: a prompt whose KV memory has no room on the device yet is prefilled all the
// same, its KV goes to the host, and comes back when there is room. It counts; the bytes are the caller's.
class HostKv {
public:
    // So many bytes, all of them to be used.
    explicit HostKv(std::uint64_t physical_bytes) {
        detail::require_abi();
        vmmgraph_host_kv_t handle = nullptr;
        detail::check(vmmgraph_host_kv_create(physical_bytes, &handle));
        handle_ = detail::Owned<vmmgraph_host_kv_t, vmmgraph_host_kv_destroy>(handle);
    }

    // It is used for so many bytes at most: the physical ones at most. What is there beyond stays until it is taken.
    void set_logical(std::uint64_t bytes) { detail::check(vmmgraph_host_kv_set_logical(handle(), bytes)); }

    // Room for a sequence's bytes that is not there yet; whether there was.
    [[nodiscard]] bool put(std::uint64_t sequence, std::uint64_t bytes) { return add(vmmgraph_host_kv_put, sequence, bytes); }

    // The same within the physical size only: for one that would lose its KV memory otherwise.
    [[nodiscard]] bool rescue(std::uint64_t sequence, std::uint64_t bytes) { return add(vmmgraph_host_kv_rescue, sequence, bytes); }

    // A sequence's bytes are on the device again, or nobody's; how many. Throws for one that is not there.
    std::uint64_t take(std::uint64_t sequence) {
        std::uint64_t bytes = 0;
        detail::check(vmmgraph_host_kv_take(handle(), sequence, &bytes));
        return bytes;
    }

    // What is there now.
    [[nodiscard]] HostKvStats stats() const {
        auto stats = detail::sized<HostKvStats>();
        detail::check(vmmgraph_host_kv_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_host_kv_t handle() const noexcept { return handle_.get(); }

private:
    template <class Add>
    [[nodiscard]] bool add(Add function, std::uint64_t sequence, std::uint64_t bytes) {
        std::int32_t there = 0;
        detail::check(function(handle(), sequence, bytes, &there));
        return there != 0;
    }

    detail::Owned<vmmgraph_host_kv_t, vmmgraph_host_kv_destroy> handle_;
};

// What an iteration led to.
enum class SloChange : std::int32_t {
    keep = VMMGRAPH_SLO_KEEP,
    // Twice as much: first tokens were late.
    raised = VMMGRAPH_SLO_RAISED,
    // Half as much: later tokens were late.
    lowered = VMMGRAPH_SLO_LOWERED,
};

// A size, for HostKv::set_logical(), that doubles when first tokens were late in three of the last five iterations, halves when later tokens
// were, and stays when both were. As eLLM does with the logical size of its buffer.
class SloControl {
public:
    // Between `least` and `most`, beginning at `value`. Throws for a least of 0, from which nothing grows, and for a value out of these bounds.
    SloControl(std::uint64_t least, std::uint64_t value, std::uint64_t most) {
        detail::require_abi();
        vmmgraph_slo_control_t handle = nullptr;
        detail::check(vmmgraph_slo_control_create(least, value, most, &handle));
        handle_ = detail::Owned<vmmgraph_slo_control_t, vmmgraph_slo_control_destroy>(handle);
    }

    // An iteration is over: whether a first token was late in it (TTFT), or another one (TPOT). What changed, and the size from now on.
    std::pair<SloChange, std::uint64_t> step(bool first_late, bool other_late) {
        std::int32_t change = 0;
        std::uint64_t value = 0;
        detail::check(vmmgraph_slo_control_step(handle(), first_late ? 1 : 0, other_late ? 1 : 0, &change, &value));
        return {static_cast<SloChange>(change), value};
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_slo_control_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_slo_control_t, vmmgraph_slo_control_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_POLICIES_HPP
