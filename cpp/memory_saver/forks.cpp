#include "forks.hpp"

#include <pthread.h>

#include <atomic>

namespace vmmgraph::memory_saver {

namespace {

std::atomic<bool> used{false};
std::atomic<bool> child{false};

std::mutex& mutex() noexcept {
    // Constant initialisation, and nothing to destroy: usable before and after every static object.
    static std::mutex mutex;
    return mutex;
}

}  // namespace

std::mutex& tables() noexcept {
    // It fails for lack of memory only, and then forks go unnoticed.
    [[maybe_unused]] static const int watching = pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                                                                [] {
                                                                    mutex().unlock();
                                                                    child.store(used.load());
                                                                });
    return mutex();
}

void note_use() noexcept { used.store(true, std::memory_order_relaxed); }

bool in_child() noexcept { return child.load(std::memory_order_relaxed); }

}  // namespace vmmgraph::memory_saver
