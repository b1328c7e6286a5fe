// Scheduler built from the policies: requests share a number of pages for KV and activations, and
// wait in a queue or on the host. No request is lost.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <vector>
#include <vmmgraph/policies.hpp>

namespace {

constexpr std::uint64_t pages = 256, block_tokens = 16;  // A page has one block of all planes.
constexpr std::uint64_t patience = 400;                  // Steps after which a request goes first.

struct Request {
    std::uint64_t id, arrival, tokens, generated, wanted, first;
};

std::uint64_t blocks_of(std::uint64_t tokens) { return (tokens + block_tokens - 1) / block_tokens; }

}  // namespace

int main() {
    std::mt19937_64 random(1);
    vmmgraph::Grants grants(pages, 4);
    vmmgraph::Lengths lengths(64, 900, 64);
    vmmgraph::HostKv host(512);  // In blocks.
    vmmgraph::SloControl control(16, 64, 512);
    std::vector<Request> waiting, running, parked;
    std::uint64_t served = 0, by_the_host = 0, lost = 0, most = 0;
    const auto admitted = [&](const Request& one) {
        std::vector<vmmgraph::Growing> all{
            {one.tokens + 1, lengths.total(one.generated) - one.generated}};
        for (const auto& other : running) {
            all.push_back({other.tokens, lengths.total(other.generated) - other.generated});
        }
        // Reserves a quarter for the activations of later prompts.
        return running.empty() || vmmgraph::admission_peak(block_tokens, all) <= pages * 3 / 4;
    };
    for (std::uint64_t step = 0; served < 400; ++step) {
        if (const auto id = step / 2; step % 2 == 0 && id < 400) {
            const auto prompt = 1 + random() % (id % 20 == 0 ? 1500 : 200);
            waiting.push_back({id, step, prompt, 0, 1 + random() % 120, 0});
        }
        bool first_late = false, other_late = false;
        // Fetch parked requests as room allows.
        for (auto one = parked.begin(); one != parked.end();) {
            const auto blocks = blocks_of(one->tokens);
            if (admitted(*one) && grants.ask(one->id, {blocks, 0}) == vmmgraph::Grant::granted) {
                host.take(one->id);
                running.push_back(*one);
                one = parked.erase(one);
            } else {
                ++one;
            }
        }
        std::vector<vmmgraph::Due> due;
        for (const auto& one : waiting) {
            due.push_back(
                {one.arrival + 20 + one.tokens / 50, 1 + one.tokens / 200, one.arrival + patience});
        }
        std::vector<vmmgraph::Decoding> decoding;
        for (const auto& one : running) {
            decoding.push_back({one.first, one.generated, 3});
        }
        for (const auto at : vmmgraph::in_turn(step, due).order) {
            auto one = waiting[at];
            const vmmgraph::Prompt prompt{one.arrival, due[at].by, due[at].takes, due[at].patience};
            if (vmmgraph::prefill_waits(step, prompt.takes, {prompt}, decoding)) {
                continue;
            }
            const vmmgraph::Need need{blocks_of(one.tokens + 1), one.tokens / 32 + 1};
            const bool there =
                admitted(one) && grants.ask(one.id, need) == vmmgraph::Grant::granted;
            if (!there) {
                grants.forget(one.id);
                if (!vmmgraph::to_host(step, prompt) || !host.put(one.id, need.kv)) {
                    continue;
                }
                if (grants.ask(one.id, {0, need.activations}) != vmmgraph::Grant::granted) {
                    grants.forget(one.id);
                    host.take(one.id);
                    continue;
                }
            }
            first_late = step > due[at].by;
            const auto stats = grants.stats();
            most = std::max(most, stats.kv + stats.activations);
            grants.give({0, need.activations});  // The prefill has ended.
            one.first = step;
            one.tokens += 1;
            one.generated = 1;
            by_the_host += !there;
            (there ? running : parked).push_back(one);
            waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
            break;
        }
        // One token per running request. If no page is free, the last request moves to the host.
        for (std::size_t i = 0; i < running.size(); ++i) {
            while (blocks_of(running[i].tokens + 1) > blocks_of(running[i].tokens) &&
                   !grants.extend(1)) {
                const auto last = running.back();
                grants.give({blocks_of(last.tokens), 0});
                lost += !host.rescue(last.id, blocks_of(last.tokens));
                parked.push_back(last);
                running.pop_back();
                if (i == running.size()) {
                    break;
                }
            }
            if (i < running.size()) {
                ++running[i].tokens;
                ++running[i].generated;
                other_late |= step - running[i].first > 3 * running[i].generated;
            }
        }
        const auto over = [&](const Request& one) {
            if (one.generated < one.wanted) {
                return false;
            }
            grants.give({blocks_of(one.tokens), 0});
            lengths.ended(one.generated);
            ++served;
            return true;
        };
        running.erase(std::remove_if(running.begin(), running.end(), over), running.end());
        host.set_logical(control.step(first_late, other_late).second);
    }
    const auto left = grants.stats();
    std::printf(
        "%llu served, %llu by way of the host, %llu lost; %llu of %llu pages at most, %llu left "
        "granted\n",
        static_cast<unsigned long long>(served), static_cast<unsigned long long>(by_the_host),
        static_cast<unsigned long long>(lost), static_cast<unsigned long long>(most),
        static_cast<unsigned long long>(pages),
        static_cast<unsigned long long>(left.kv + left.activations));
}
