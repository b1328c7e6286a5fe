// KV cache after a burst under the example's scheduler. The model sums the cache contents, so a
// wrong block changes tokens.
#include <cstdio>
#include <random>

#include "../../examples/xllm_executor/server.hpp"
#include "devices.hpp"

namespace engine_tests {
namespace {

using xllm_example::Request;
using xllm_example::Sequence;
using xllm_example::Server;
using xllm_example::ServingMemory;

constexpr std::int64_t block_size = 16;
constexpr std::int64_t modulus = 997;

struct Idle {
    double pages_of_floor = 0;
    std::uint64_t pages = 0, floor = 0, most_pages = 0, moved = 0;
    std::size_t wrong = 0;
};

Idle after_a_burst(bool gather) {
    const std::uint64_t page_bytes = has_gpu() ? 2 << 20 : 64 << 10;
    auto device = [] {
        vmmgraph::DeviceOptions options;
        if (!has_gpu()) {
            options.driver = vmmgraph::DriverChoice::host;
            options.device = 6;
            options.host_granularity_bytes = 4 << 10;
            options.host_memory_bytes = 256 << 20;
        }
        return vmmgraph::Device::open(options);
    }();
    const OnStream guard;
    device.trim();
    const auto others = device.stats().physical_bytes;
    vmmgraph::ArenaOptions arena_options;
    arena_options.small_page_bytes = has_gpu() ? 0 : 4 << 10;
    arena_options.large_page_bytes = page_bytes;
    const vmmgraph::SharedVmmAllocator arena(device, arena_options);
    // 32 blocks per page on a GPU, 8 elsewhere.
    vmmgraph::torch::KvTensorOptions kv_options{
        {vmmgraph::torch::KvPlane{{block_size, has_gpu() ? 512 : 64}, at::kLong}},
        1 << 14,
        vmmgraph::KvLayout::by_block,
        {}};
    kv_options.memory.page_bytes = page_bytes;
    vmmgraph::torch::KvTensors kv(device, kv_options);
    const auto a_page = kv.cache().stats().blocks_a_page;
    const auto plane = kv.planes().front();
    xllm_example::MemoryOptions options;
    options.kv_bytes = (std::uint64_t{1} << 14) / a_page * page_bytes;
    options.lending = false;
    options.free_blocks = {a_page / 4, a_page / 2};
    options.residence = 10;
    options.stream = stream();
    ServingMemory memory(kv, arena, options);

    const auto longs = [](const std::vector<std::int64_t>& of) {
        return at::tensor(of, at::kLong).to(engine_tests::device());
    };
    const auto write = [&](const std::vector<Sequence*>& sequences) {
        std::vector<std::int64_t> blocks, offsets, values;
        for (auto* const sequence : sequences) {
            for (auto& place = sequence->in_cache;
                 place < static_cast<std::int64_t>(sequence->tokens.size()); ++place) {
                blocks.push_back(sequence->blocks[static_cast<std::size_t>(place / block_size)]);
                offsets.push_back(place % block_size);
                values.push_back(sequence->tokens[static_cast<std::size_t>(place)] * (place + 1));
            }
        }
        auto to = plane;
        to.index_put_({longs(blocks), longs(offsets)},
                      longs(values).unsqueeze(1).expand({-1, plane.size(2)}));
    };
    const auto sums = [&](const std::vector<Sequence*>& sequences) {
        std::vector<std::int64_t> next;
        for (auto* const sequence : sequences) {
            std::vector<std::int64_t> blocks(
                sequence->blocks.begin(),
                sequence->blocks.begin() + (sequence->in_cache + block_size - 1) / block_size);
            // Equal numbers across its width.
            const auto held =
                plane.index({longs(blocks)}).flatten(0, 1).narrow(0, 0, sequence->in_cache);
            const auto ends = held.index_select(1, longs({0, plane.size(2) - 1})).sum(0).cpu();
            const auto* const both = ends.const_data_ptr<std::int64_t>();
            next.push_back(both[0] == both[1] ? both[0] % modulus : -1);
        }
        return next;
    };
    Server server(memory,
                  {[&](Sequence& sequence) {
                       write({&sequence});
                       return sums({&sequence}).front();
                   },
                   [&](const std::vector<Sequence*>& sequences) {
                       write(sequences);
                       return sums(sequences);
                   },
                   [](const Request&) { return false; }},
                  {block_size, 1 << 12, 16, 64, gather ? std::optional(a_page / 4) : std::nullopt});
    // Long sequences share pages with short ones.
    constexpr std::uint64_t count = 240, every = 16;
    std::map<std::uint64_t, std::vector<std::int32_t>> expected;
    for (std::uint64_t id = 0; id < count; ++id) {
        std::mt19937_64 random(id);
        const auto pick = [&](std::int64_t from, std::int64_t to) {
            return from +
                   static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
        };
        const bool stays = id % every == 5;
        Request request{id, {}, 0};
        const auto prompt = pick(1, 100);
        for (std::int64_t i = 0; i < prompt; ++i) {
            request.prompt.push_back(static_cast<std::int32_t>(pick(0, 999)));
        }
        request.wanted = prompt + (stays ? pick(200, 260) : pick(5, 90));
        auto tokens = request.prompt;
        for (std::int64_t sum = 0, place = 0;
             static_cast<std::int64_t>(tokens.size()) < request.wanted; ++place) {
            sum += tokens[static_cast<std::size_t>(place)] * (place + 1);
            if (place + 1 == static_cast<std::int64_t>(tokens.size())) {
                tokens.push_back(static_cast<std::int32_t>(sum % modulus));
            }
        }
        expected.emplace(id, std::move(tokens));
        server.submit(std::move(request));
    }
    Idle idle;
    const auto pages = [&] { return kv.cache().memory().committed_bytes / page_bytes; };
    std::uint64_t quiet = 0;
    while (server.step()) {
        idle.most_pages = std::max<std::uint64_t>(idle.most_pages, pages());
        if (server.waiting() == 0 && server.under_way() == count / every && ++quiet == 30) {
            wait();
            kv.cache().reap();
            device.trim();
            idle.pages = pages();
            EXPECT_EQ(device.stats().physical_bytes, others + idle.pages * page_bytes)
                << "what was given back is the driver's";
            idle.floor = (memory.pool().stats().in_use + a_page - 1) / a_page;
            idle.pages_of_floor = static_cast<double>(idle.pages) / static_cast<double>(idle.floor);
        }
    }
    idle.moved = server.stats().moved;
    for (const auto& [id, tokens] : expected) {
        const auto done = server.done().find(id);
        idle.wrong += done == server.done().end() || done->second != tokens;
    }
    return idle;
}

TEST(Idle, AfterABurstACacheHoldsLittleMoreThanItsBlocks) {
    const auto stay = after_a_burst(false), gathered = after_a_burst(true);
    for (const auto& [how, idle] :
         {std::pair{"where they are", stay}, std::pair{"gathered", gathered}}) {
        std::printf(
            "RESULT idle, blocks %s: %llu pages at most, %llu when the burst is over, %.3f of the "
            "%llu that its blocks fill; %llu moved, "
            "%zu "
            "sequences wrong\n",
            how, static_cast<unsigned long long>(idle.most_pages),
            static_cast<unsigned long long>(idle.pages), idle.pages_of_floor,
            static_cast<unsigned long long>(idle.floor),
            static_cast<unsigned long long>(idle.moved), idle.wrong);
        EXPECT_EQ(idle.wrong, 0u);
        EXPECT_GT(idle.floor, 0u) << "no step was idle";
        EXPECT_GT(idle.most_pages, idle.pages);
    }
    EXPECT_GT(gathered.moved, 0u);
    EXPECT_LE(gathered.pages_of_floor, 1.2);
}

}  // namespace
}  // namespace engine_tests
