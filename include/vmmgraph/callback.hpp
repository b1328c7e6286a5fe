// Callback registry: C++ functions called from C, which stay valid during calls in progress.
#ifndef VMMGRAPH_CALLBACK_HPP
#define VMMGRAPH_CALLBACK_HPP

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base.hpp"

namespace vmmgraph::detail {

// Holds `Functions` under a key, passed to C as `user`. C may call while another thread, or the
// function itself, destroys the owner. Then the key is already unknown, or the functions live until
// their call returns.
template <class Functions>
class Callbacks {
public:
    explicit Callbacks(Functions functions) {
        auto& all = table();
        auto held = std::make_shared<Functions>(std::move(functions));
        const std::lock_guard lock(all.mutex);
        key_ = ++all.last;
        all.held.emplace(key_, std::move(held));
    }
    Callbacks(Callbacks&& other) noexcept : key_(std::exchange(other.key_, 0)) {}
    Callbacks& operator=(Callbacks&& other) noexcept {
        // The previous functions of this object are destroyed with `other`.
        std::swap(key_, other.key_);
        return *this;
    }
    Callbacks(const Callbacks&) = delete;
    Callbacks& operator=(const Callbacks&) = delete;
    ~Callbacks() {
        std::shared_ptr<Functions> gone;
        auto& all = table();
        const std::lock_guard lock(all.mutex);
        if (const auto found = all.held.find(key_); found != all.held.end()) {
            gone = std::move(found->second);
            all.held.erase(found);
        }
    }

    // The key, as C's `user` argument.
    [[nodiscard]] void* user() const noexcept { return reinterpret_cast<void*>(key_); }

    // Returns the functions of a key; null after the owner is destroyed.
    [[nodiscard]] static std::shared_ptr<Functions> of(void* user) {
        auto& all = table();
        const std::lock_guard lock(all.mutex);
        const auto found = all.held.find(reinterpret_cast<std::uintptr_t>(user));
        return found == all.held.end() ? nullptr : found->second;
    }

private:
    struct Table {
        std::mutex mutex;
        std::uintptr_t last = 0;
        std::unordered_map<std::uintptr_t, std::shared_ptr<Functions>> held;
    };
    // Never destroyed: objects with static storage duration may outlive the table.
    static Table& table() {
        static auto* const made = new Table;
        return *made;
    }

    std::uintptr_t key_ = 0;
};

}  // namespace vmmgraph::detail

#endif  // VMMGRAPH_CALLBACK_HPP
