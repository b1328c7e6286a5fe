#include "forks.hpp"

#include <pthread.h>

#include <atomic>

namespace vmmgraph::memory_saver {

namespace {

std::atomic<bool> used{false};
std::atomic<bool> child{false};

std::mutex& mutex() noexcept {
    // Constant-initialised and never destroyed: usable before and after all static objects.
    static std::mutex mutex;
    return mutex;
}

}  // namespace

std::mutex& tables() noexcept {
    // Fails only without memory; forks are then not detected.
    [[maybe_unused]] static const int watching =
        pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                       [] {
                           mutex().unlock();
                           child.store(used.load());
                       });
    return mutex();
}

void note_use() noexcept { used.store(true, std::memory_order_relaxed); }

bool in_child() noexcept { return child.load(std::memory_order_relaxed); }

}  // namespace vmmgraph::memory_saver
