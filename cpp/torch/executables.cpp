#include "executables.hpp"

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "compat.hpp"
#include "guards.hpp"

namespace vmmgraph::torch {
namespace {

rust::Box<bridge::ExecutablePool> make_pool(const SharedVmmAllocator& arena,
                                            const ExecutableLimits& limits) {
    try {
        return bridge::executable_pool(reinterpret_cast<std::size_t>(arena.handle()),
                                       limits.max_graphs, limits.max_bytes);
    } catch (const rust::Error& error) {
        // No rust:: type leaves the library.
        refuse(VMMGRAPH_ERROR_WRONG_STATE, error.what());
    }
}

}  // namespace

ExecutablePool::ExecutablePool(const SharedVmmAllocator& arena, const ExecutableLimits& limits)
    : state_(new State{device_of(arena), make_pool(arena, limits), {}}) {}
ExecutablePool::~ExecutablePool() = default;

std::shared_ptr<ExecutablePool> ExecutablePool::of(const SharedVmmAllocator& arena) {
    static std::mutex mutex;
    static auto* const all =
        new std::unordered_map<c10::DeviceIndex, std::weak_ptr<ExecutablePool>>;
    const auto device = device_of(arena).index();
    const std::lock_guard lock(mutex);
    auto& known = (*all)[device];
    auto pool = known.lock();
    if (!pool) {
        known = pool = std::make_shared<ExecutablePool>(arena, ExecutableLimits{});
    }
    return pool;
}

std::shared_ptr<ExecutablePool> ExecutablePool::State::of(
    const SharedVmmAllocator& arena, const std::shared_ptr<ExecutablePool>& named) {
    if (named && named->state_->device != device_of(arena)) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot use the executable pool: it is on " +
                                                    named->state_->device.str() +
                                                    " and the arena on " + device_of(arena).str() +
                                                    "; pass a pool of the arena's device");
    }
    return named ? named : ExecutablePool::of(arena);
}

void ExecutablePool::set_limits(const ExecutableLimits& limits) {
    bridge::set_executable_limits(*state_->pool, limits.max_graphs, limits.max_bytes);
}

void ExecutablePool::evict() { bridge::evict_executables(*state_->pool); }

ExecutableStats ExecutablePool::stats() const {
    const auto now = bridge::executable_stats(*state_->pool);
    return {{now.max_graphs, now.max_bytes},
            now.graphs,
            now.instantiated,
            now.executables,
            now.nodes,
            now.template_nodes,
            now.bytes,
            now.instantiations,
            now.ahead,
            now.evictions,
            now.hits,
            now.misses};
}

std::string ExecutablePool::prometheus(
    const std::vector<std::pair<std::string, std::string>>& labels) const {
    std::vector<rust::Str> texts;
    try {
        for (const auto& [name, value] : labels) {
            texts.emplace_back(name);
            texts.emplace_back(value);
        }
    } catch (const std::invalid_argument& error) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot write the counters: a label is not UTF-8; pass labels in UTF-8");
    }
    return std::string(bridge::executable_prometheus(*state_->pool, {texts.data(), texts.size()}));
}

Template::Template(std::shared_ptr<ExecutablePool> pool, const std::vector<cudaGraph_t>& graphs,
                   bool pinned)
    : pool_(std::move(pool)), held_(bridge::no_template()), executables_(graphs.size()) {
    std::vector<std::size_t> raw;
    raw.reserve(graphs.size());
    for (auto* const graph : graphs) {
        raw.push_back(reinterpret_cast<std::size_t>(graph));
    }
    detail::check(
        bridge::add_graphs(*held_, *pool_->state_->pool, {raw.data(), raw.size()}, pinned));
}

std::uint64_t Template::expected_bytes(const ExecutablePool& pool,
                                       const std::vector<cudaGraph_t>& graphs) {
    std::size_t nodes = 0;
    for (auto* const graph : graphs) {
        std::size_t count = 0;
        nodes += cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess ? count : 0;
    }
    return bridge::expected_executable_bytes(*pool.state_->pool, graphs.size(), nodes);
}

Template::Launch::Launch(Template& from) : from_(from) {
    detail::check(
        bridge::acquire(*from.held_, {from.executables_.data(), from.executables_.size()}));
}

bool Template::instantiate() {
    const std::lock_guard lock(mutex_);
    bool instantiated = false;
    if (!closed_) {
        detail::check(bridge::instantiate(*held_, instantiated));
    }
    return instantiated;
}

void Template::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    held_ = bridge::no_template();
}

}  // namespace vmmgraph::torch
