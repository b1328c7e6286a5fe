#include "engine.hpp"

#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

namespace sleep_example {
namespace {

constexpr std::uint32_t most_sequences = 16;

// Written once, so the host copy of the first sleep serves all later sleeps.
vmmgraph::RegionOptions for_weights() {
    vmmgraph::RegionOptions options;
    options.policy = vmmgraph::Policy::backup;
    options.read_only = true;
    return options;
}

vmmgraph::ArenaOptions for_arena(const std::string& tag) {
    vmmgraph::ArenaOptions options;
    options.tag = tag;
    return options;
}

xllm_example::Options for_graphs() {
    auto options = xllm_example::Options();
    options.max_seqs_per_batch = most_sequences;
    return options;
}

// Calls `make` with its allocations in the region.
template <class Make>
auto in(const vmmgraph::Region& region, Make&& make) {
    const vmmgraph::torch::RegionScope scope(region);
    return std::forward<Make>(make)();
}

}  // namespace

Engine::Engine(const vmmgraph::Device& device, const ModelArgs& args, const std::string& name)
    : device_(device),
      weights_tag_(name + " weights"),
      kv_tag_(name + " kv"),
      weights_(device, weights_tag_, for_weights()),
      kv_(device, kv_tag_, {vmmgraph::Policy::discard}),
      model_(in(weights_, [&] { return xllm_example::Decoder(args); })),
      caches_(in(kv_, [&] { return model_.make_caches(); })),
      arena_(std::make_shared<vmmgraph::SharedVmmAllocator>(device, for_arena(kv_tag_))),
      executor_(model_, arena_, for_graphs()) {
    graphs_ = executor_.warm_up(caches_);
    restart();
}

void Engine::restart() {
    scheduler_ = std::make_unique<xllm_example::Scheduler>(model_.args(), most_sequences, 11);
}

std::vector<std::int64_t> Engine::step() {
    const auto input = scheduler_->next().to(model_.args().options.device());
    const auto output =
        executor_.run(input.token_ids, input.positions, caches_, input.input_params);
    by_graphs_ += output.ran.mode != vmmgraph::engine::Mode::eager;
    const auto rows = at::tensor(scheduler_->rows(), at::kLong).to(input.token_ids.device());
    const auto tokens = model_.greedy(output.hidden_states.index_select(0, rows)).cpu();
    std::vector<std::int64_t> next(tokens.const_data_ptr<std::int64_t>(),
                                   tokens.const_data_ptr<std::int64_t>() + tokens.numel());
    scheduler_->take(next);
    return next;
}

vmmgraph::PauseReport Engine::sleep() {
    // The graphs' pages are freed with the cache; the graphs stay unchanged.
    const auto report = vmmgraph::pause(device_, {weights_tag_, kv_tag_},
                                        {{c10::cuda::getCurrentCUDAStream().stream()}});
    scheduler_->lose_cache();
    // Torch's cached memory must also become free for other programs.
    c10::cuda::CUDACachingAllocator::emptyCache();
    return report;
}

vmmgraph::ResumeReport Engine::wake_weights(std::chrono::microseconds deadline) {
    return vmmgraph::resume(device_, {weights_tag_}, deadline);
}

vmmgraph::ResumeReport Engine::wake_cache(std::chrono::microseconds deadline) {
    const auto report = vmmgraph::resume(device_, {kv_tag_}, deadline);
    // The contents are undefined now. Positions after a sequence's end are multiplied by 0, but 0
    // times NaN is NaN.
    for (const auto& cache : caches_) {
        cache.k.zero_();
        cache.v.zero_();
    }
    return report;
}

}  // namespace sleep_example
