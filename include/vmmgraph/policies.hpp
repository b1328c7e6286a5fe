// Memory policies for C++17: decisions over pages, blocks and steps, without memory, a clock or a
// thread. An engine's scheduler asks a policy and acts through BlockPool (blocks.hpp), KvCache
// (elastic.hpp) and leases (lease.hpp). Header-only over vmmgraph.h. Conventions: vmmgraph.hpp.
// Thread-safe. docs/elastic.md shows their effect on traffic; examples/cpp/schedule.cpp is a
// scheduler built from these policies.
//
//   PreCommit                  commit early between two watermarks, give back late
//   Standing                   memory kept mapped between steps
//   Grants                     a step's KV memory and activations: both or neither
//   admission_peak, Lengths    whether one more sequence fits until its end
//   in_turn                    deadline order with the most work in time
//   prefill_waits, to_host     whether prompts wait for decodes, and for room
//   HostKv, SloControl         KV of waiting prompts in host memory, and its size

#ifndef VMMGRAPH_POLICIES_HPP
#define VMMGRAPH_POLICIES_HPP

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base.hpp"

namespace vmmgraph {

// Action before a step.
enum class Ahead : std::int32_t {
    nothing = VMMGRAPH_AHEAD_NOTHING,
    // Commit more blocks.
    commit = VMMGRAPH_AHEAD_COMMIT,
    // Give back the memory of free blocks.
    give_back = VMMGRAPH_AHEAD_GIVE_BACK,
};

// Watermarks of free blocks: below `low`, blocks are committed up to `high`; blocks beyond `high`
// are given back.
struct Watermarks {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
};

// Decides when to commit blocks ahead of need and when to give blocks back.
class PreCommit {
public:
    // See vmmgraph_pre_commit_create().
    PreCommit(Watermarks marks, std::uint64_t lead, std::uint64_t residence) {
        detail::require_abi();
        vmmgraph_pre_commit_t handle = nullptr;
        detail::check(vmmgraph_pre_commit_create(marks.low, marks.high, lead, residence, &handle));
        handle_ = detail::Owned<vmmgraph_pre_commit_t, vmmgraph_pre_commit_destroy>(handle);
    }

    // Decides before step number `step`: the action and its number of blocks. See
    // vmmgraph_pre_commit_step().
    [[nodiscard]] std::pair<Ahead, std::uint64_t> step(std::uint64_t step, std::uint64_t free,
                                                       std::uint64_t coming,
                                                       std::uint64_t granted) {
        std::int32_t action = 0;
        std::uint64_t blocks = 0;
        detail::check(
            vmmgraph_pre_commit_step(handle(), step, free, coming, granted, &action, &blocks));
        return {static_cast<Ahead>(action), blocks};
    }

    [[nodiscard]] vmmgraph_pre_commit_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_pre_commit_t, vmmgraph_pre_commit_destroy> handle_;
};

// Decides how much memory stays mapped between steps: the maximum used by one of the last steps.
// Amounts have any unit.
class Standing {
public:
    // See vmmgraph_standing_create().
    Standing(std::uint64_t residence, std::uint64_t gap) {
        detail::require_abi();
        vmmgraph_standing_t handle = nullptr;
        detail::check(vmmgraph_standing_create(residence, gap, &handle));
        handle_ = detail::Owned<vmmgraph_standing_t, vmmgraph_standing_destroy>(handle);
    }

    // Records the amount used by step number `step`, which never decreases.
    void used(std::uint64_t step, std::uint64_t amount) {
        detail::check(vmmgraph_standing_used(handle(), step, amount));
    }

    // Returns the amount to keep at a step.
    [[nodiscard]] std::uint64_t wanted(std::uint64_t step) {
        std::uint64_t amount = 0;
        detail::check(vmmgraph_standing_at(handle(), step, 0, &amount, nullptr));
        return amount;
    }

    // Returns the part of `held` to give back at a step; 0: nothing.
    [[nodiscard]] std::uint64_t too_much(std::uint64_t step, std::uint64_t held) {
        std::uint64_t amount = 0;
        detail::check(vmmgraph_standing_at(handle(), step, held, nullptr, &amount));
        return amount;
    }

    [[nodiscard]] vmmgraph_standing_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_standing_t, vmmgraph_standing_destroy> handle_;
};

// Answer to a request for pages.
enum class Grant : std::int32_t {
    // Granted in full.
    granted = VMMGRAPH_GRANT_GRANTED,
    // Nothing granted. The step keeps its place and should ask again after pages are returned.
    not_now = VMMGRAPH_GRANT_NOT_NOW,
    // More pages than exist; the step no longer waits.
    never = VMMGRAPH_GRANT_NEVER,
};

// Additional pages needed by a step.
struct Need {
    // KV pages, held until its sequences end.
    std::uint64_t kv = 0;
    // Activation pages, held until the step ends.
    std::uint64_t activations = 0;
};

// Statistics of grants.
using GrantsStats = vmmgraph_grants_stats_t;

// Grants one pool of pages to the KV memory and activations of all steps in progress. A step gets
// both or neither, so steps never deadlock on each other.
class Grants {
public:
    // Creates a pool of `pages`; a waiting step is overtaken at most `overtakes` times.
    Grants(std::uint64_t pages, std::uint64_t overtakes) {
        detail::require_abi();
        vmmgraph_grants_t handle = nullptr;
        detail::check(vmmgraph_grants_create(pages, overtakes, &handle));
        handle_ = detail::Owned<vmmgraph_grants_t, vmmgraph_grants_destroy>(handle);
    }

    // Changes the total. Pages granted beyond the total stay granted until given back.
    void set_pages(std::uint64_t pages) {
        detail::check(vmmgraph_grants_set_pages(handle(), pages));
    }

    // Asks for pages for step `who`. See vmmgraph_grants_ask().
    [[nodiscard]] Grant ask(std::uint64_t who, Need need) {
        std::int32_t answer = 0;
        detail::check(vmmgraph_grants_ask(handle(), who, need.kv, need.activations, &answer));
        return static_cast<Grant>(answer);
    }

    // Takes KV pages for a running step; false if too few are free. See vmmgraph_grants_extend().
    [[nodiscard]] bool extend(std::uint64_t kv) {
        std::int32_t there = 0;
        detail::check(vmmgraph_grants_extend(handle(), kv, &there));
        return there != 0;
    }

    // Removes a waiting step.
    void forget(std::uint64_t who) { detail::check(vmmgraph_grants_forget(handle(), who)); }

    // Gives back pages, at most those granted: activations of an ended step, KV pages of ended
    // sequences.
    void give(Need back) {
        detail::check(vmmgraph_grants_give(handle(), back.kv, back.activations));
    }

    [[nodiscard]] GrantsStats stats() const {
        auto stats = detail::sized<GrantsStats>();
        detail::check(vmmgraph_grants_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_grants_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_grants_t, vmmgraph_grants_destroy> handle_;
};

// A sequence growing by a token per step: tokens with memory now, and tokens to come (known or
// predicted).
using Growing = vmmgraph_growing_t;

// Returns the peak number of blocks of these sequences. See vmmgraph_admission_peak().
[[nodiscard]] inline std::uint64_t admission_peak(std::uint64_t block_tokens,
                                                  const std::vector<Growing>& sequences) {
    detail::require_abi();
    std::uint64_t blocks = 0;
    detail::check(
        vmmgraph_admission_peak(block_tokens, sequences.data(), sequences.size(), &blocks));
    return blocks;
}

// Predicts the final length of a sequence from recently ended, longer ones.
class Lengths {
public:
    // See vmmgraph_lengths_create().
    Lengths(std::size_t window, std::uint64_t per_mille, std::uint64_t first) {
        detail::require_abi();
        vmmgraph_lengths_t handle = nullptr;
        detail::check(vmmgraph_lengths_create(window, per_mille, first, &handle));
        handle_ = detail::Owned<vmmgraph_lengths_t, vmmgraph_lengths_destroy>(handle);
    }

    // Records the generated tokens of an ended sequence.
    void ended(std::uint64_t tokens) { detail::check(vmmgraph_lengths_ended(handle(), tokens)); }

    // Returns the predicted final number of tokens for a sequence with `generated` tokens.
    [[nodiscard]] std::uint64_t total(std::uint64_t generated) const {
        std::uint64_t tokens = 0;
        detail::check(vmmgraph_lengths_total(handle(), generated, &tokens));
        return tokens;
    }

    [[nodiscard]] vmmgraph_lengths_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_lengths_t, vmmgraph_lengths_destroy> handle_;
};

// A waiting item: deadline, duration, and the time after which the item goes first. Any unit.
using Due = vmmgraph_due_t;

// Positions of waiting items in deadline order: the most items finish in time, one by one.
struct Turns {
    std::vector<std::size_t> order;
    // Number of leading items which are out of patience or will be in time.
    std::size_t timely = 0;
};

// Orders items from `now`. See vmmgraph_in_turn().
[[nodiscard]] inline Turns in_turn(std::uint64_t now, const std::vector<Due>& all) {
    detail::require_abi();
    Turns turns{std::vector<std::size_t>(all.size()), 0};
    detail::check(vmmgraph_in_turn(now, all.data(), all.size(), turns.order.data(), &turns.timely));
    return turns;
}

// A waiting prompt: arrival, deadline of the first token, prefill duration, and the time after
// which the prompt begins regardless of others. Any unit.
using Prompt = vmmgraph_prompt_t;

// A decoding sequence: time of the first token, tokens so far, and allowed average time per token.
using Decoding = vmmgraph_decoding_t;

// Returns true if a prompt's KV memory should go to the host. See vmmgraph_prompt_to_host().
[[nodiscard]] inline bool to_host(std::uint64_t now, const Prompt& prompt) {
    detail::require_abi();
    std::int32_t goes = 0;
    detail::check(vmmgraph_prompt_to_host(now, &prompt, &goes));
    return goes != 0;
}

// Returns true if a prefill of duration `takes` should wait for another decode step. See
// vmmgraph_prefill_waits().
[[nodiscard]] inline bool prefill_waits(std::uint64_t now, std::uint64_t takes,
                                        const std::vector<Prompt>& prompts,
                                        const std::vector<Decoding>& decoding) {
    detail::require_abi();
    std::int32_t waits = 0;
    detail::check(vmmgraph_prefill_waits(now, takes, prompts.data(), prompts.size(),
                                         decoding.data(), decoding.size(), &waits));
    return waits != 0;
}

// Statistics of KV on the host.
using HostKvStats = vmmgraph_host_kv_stats_t;

// Accounting of host memory for the KV of waiting sequences. Counts only; the caller owns the
// memory.
class HostKv {
public:
    // Creates an account of `physical_bytes`, initially all usable.
    explicit HostKv(std::uint64_t physical_bytes) {
        detail::require_abi();
        vmmgraph_host_kv_t handle = nullptr;
        detail::check(vmmgraph_host_kv_create(physical_bytes, &handle));
        handle_ = detail::Owned<vmmgraph_host_kv_t, vmmgraph_host_kv_destroy>(handle);
    }

    // Limits use to `bytes`, at most the physical size. KV beyond stays until taken.
    void set_logical(std::uint64_t bytes) {
        detail::check(vmmgraph_host_kv_set_logical(handle(), bytes));
    }

    // Takes room for a sequence's bytes; false if there is too little, or if it is already present.
    [[nodiscard]] bool put(std::uint64_t sequence, std::uint64_t bytes) {
        return add(vmmgraph_host_kv_put, sequence, bytes);
    }

    // As put(), limited by the physical size only: for a sequence which would lose its KV memory.
    [[nodiscard]] bool rescue(std::uint64_t sequence, std::uint64_t bytes) {
        return add(vmmgraph_host_kv_rescue, sequence, bytes);
    }

    // Removes a sequence, restored or dropped, and returns its bytes. Throws for an unknown
    // sequence.
    std::uint64_t take(std::uint64_t sequence) {
        std::uint64_t bytes = 0;
        detail::check(vmmgraph_host_kv_take(handle(), sequence, &bytes));
        return bytes;
    }

    [[nodiscard]] HostKvStats stats() const {
        auto stats = detail::sized<HostKvStats>();
        detail::check(vmmgraph_host_kv_stats(handle(), &stats));
        return stats;
    }

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

// Effect of an iteration.
enum class SloChange : std::int32_t {
    keep = VMMGRAPH_SLO_KEEP,
    // Doubled: first tokens were late.
    raised = VMMGRAPH_SLO_RAISED,
    // Halved: later tokens were late.
    lowered = VMMGRAPH_SLO_LOWERED,
};

// Size control for HostKv::set_logical(). See vmmgraph_slo_control_step().
class SloControl {
public:
    // Starts at `value`, between `least` and `most`. Throws if `least` is 0 or `value` is out of
    // bounds.
    SloControl(std::uint64_t least, std::uint64_t value, std::uint64_t most) {
        detail::require_abi();
        vmmgraph_slo_control_t handle = nullptr;
        detail::check(vmmgraph_slo_control_create(least, value, most, &handle));
        handle_ = detail::Owned<vmmgraph_slo_control_t, vmmgraph_slo_control_destroy>(handle);
    }

    // Records an iteration: whether a first token (TTFT) or another token (TPOT) was late. Returns
    // the change and the new size.
    std::pair<SloChange, std::uint64_t> step(bool first_late, bool other_late) {
        std::int32_t change = 0;
        std::uint64_t value = 0;
        detail::check(vmmgraph_slo_control_step(handle(), first_late ? 1 : 0, other_late ? 1 : 0,
                                                &change, &value));
        return {static_cast<SloChange>(change), value};
    }

    [[nodiscard]] vmmgraph_slo_control_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_slo_control_t, vmmgraph_slo_control_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_POLICIES_HPP
