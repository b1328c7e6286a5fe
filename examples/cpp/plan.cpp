#include <cstdio>
#include <vmmgraph/dispatch.hpp>

using namespace vmmgraph::dispatch;

int main() {
    Traffic traffic;  // served shapes, and how often each occurred
    for (std::uint32_t batch = 1; batch <= 200; ++batch) {
        traffic.emplace_back(Key::of(batch, batch, uniform_decode), 10'000 / batch);
    }
    std::vector<Key> list;  // the engine's current capture list
    for (const auto size : bucket_sizes(VMMGRAPH_SIZES_XLLM, 200)) {
        list.push_back(Key::of(size, size, uniform_decode));
    }
    PlanOptions limits;
    limits.most_graphs = static_cast<std::uint32_t>(list.size());
    limits.eager_step = 1000;                      // rows of padding an eager step is worth
    const auto plan = make_plan(traffic, limits);  // the buckets with the least padding
    for (const auto& bucket : plan.buckets) {
        std::printf("%u sequences: runs %llu steps, saves %llu rows of padding\n",
                    bucket.key[Axis::batch], static_cast<unsigned long long>(bucket.steps),
                    static_cast<unsigned long long>(bucket.saves));
    }
    DispatcherOptions options;
    options.full = plan.keys();
    Dispatcher dispatcher(options);
    const auto decision = dispatcher.dispatch(Key::of(13, 13, uniform_decode), Phase::decode);
    std::printf("%zu graphs pad %llu rows, xLLM's list %llu; 13 sequences run in %u\n",
                plan.buckets.size(), static_cast<unsigned long long>(plan.waste.padding),
                static_cast<unsigned long long>(evaluate(list, traffic).padding),
                decision.bucket[Axis::batch]);
}
