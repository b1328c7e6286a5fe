#include "work_thread.hpp"

#include <utility>

#include <ATen/ThreadLocalState.h>

namespace vmmgraph::engine {

WorkThread::~WorkThread() {
    {
        const std::lock_guard lock(mutex_);
        over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void WorkThread::start(std::function<void()> first) {
    thread_ = std::thread([this, first = std::move(first)] { run(first); });
}

void WorkThread::begin(std::function<void()> work) {
    std::packaged_task<Clock::duration()> task(
        [work = std::move(work), settings = at::ThreadLocalState()] {
            const at::ThreadLocalStateGuard same(settings);
            const auto start = Clock::now();
            work();
            return Clock::now() - start;
        });
    auto outcome = task.get_future();
    if (!thread_.joinable()) {
        start([] {});
    }
    {
        const std::lock_guard lock(mutex_);
        next_ = std::move(task);
    }
    outcome_ = std::move(outcome);
    begun_ = Clock::now();
    changed_.notify_one();
}

void WorkThread::run(const std::function<void()>& first) {
    first();
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return over_ || next_.valid(); });
        if (!next_.valid()) {
            return;
        }
        {
            // Destroyed before the next wait: the work may own a graph.
            auto task = std::exchange(next_, {});
            lock.unlock();
            task();
        }
        lock.lock();
    }
}

}  // namespace vmmgraph::engine
