// Thread for work on graphs while steps go on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace vmmgraph::engine {

// Does one piece of work at a time on a thread of its own, which begins with the first work unless
// started before. One thread at a time calls the functions.
class WorkThread {
public:
    using Clock = std::chrono::steady_clock;

    WorkThread() = default;
    WorkThread(const WorkThread&) = delete;
    WorkThread& operator=(const WorkThread&) = delete;
    // Waits for the work in progress.
    ~WorkThread();

    // Starts the thread with `first`, which must not throw and has no outcome. Call before begin().
    void start(std::function<void()> first);
    // Begins `work`, with the caller's torch settings (inference mode, autocast, ...). There must
    // be no unfinished work.
    void begin(std::function<void()> work);
    // Returns true from begin() to finish().
    [[nodiscard]] bool has_work() const noexcept { return outcome_.valid(); }
    // Returns the time since begin().
    [[nodiscard]] Clock::duration elapsed() const { return Clock::now() - begun_; }
    // Waits for the work until a time. Returns true if the work is done. By the system's clock: a
    // wait by the steady clock needs a newer libstdc++ than the wheel's.
    [[nodiscard]] bool wait_until(Clock::time_point end) const {
        const auto rest =
            std::chrono::duration_cast<std::chrono::system_clock::duration>(end - Clock::now());
        return outcome_.wait_until(std::chrono::system_clock::now() + rest) ==
               std::future_status::ready;
    }
    // Waits for the work, if any.
    void wait() const {
        if (has_work()) {
            outcome_.wait();
        }
    }
    // Waits for the work, and returns its duration or throws its exception.
    Clock::duration finish() { return outcome_.get(); }

private:
    void run(const std::function<void()>& first);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::packaged_task<Clock::duration()> next_;
    bool over_ = false;
    std::future<Clock::duration> outcome_;
    Clock::time_point begun_;
    std::thread thread_;
};

}  // namespace vmmgraph::engine
