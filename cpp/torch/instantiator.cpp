#include "instantiator.hpp"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include <c10/util/Logging.h>

#include "executables.hpp"

namespace vmmgraph::torch {
namespace {

// A step has about three candidates for the next graph; older requests are stale.
constexpr std::size_t most_waiting = 8;

}  // namespace

struct Instantiator::Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::weak_ptr<Template>> waiting;
    bool over = false;
};

Instantiator::Instantiator() : queue_(std::make_shared<Queue>()) {}

Instantiator::~Instantiator() {
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->over = true;
    }
    queue_->changed.notify_all();
    if (thread_.joinable()) {
        // This thread may have released the last reference to a graph, and thereby destroyed its
        // pool and this object.
        thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
    }
}

void Instantiator::ask(std::weak_ptr<Template> graph) {
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->waiting.push_back(std::move(graph));
        if (queue_->waiting.size() > most_waiting) {
            queue_->waiting.pop_front();
        }
        if (!thread_.joinable()) {
            thread_ = std::thread([queue = queue_] { work(queue); });
        }
    }
    queue_->changed.notify_one();
}

void Instantiator::work(const std::shared_ptr<Queue>& queue) {
    std::unique_lock lock(queue->mutex);
    while (!queue->over) {
        if (queue->waiting.empty()) {
            queue->changed.wait(lock);
            continue;
        }
        const auto next = std::move(queue->waiting.front());
        queue->waiting.pop_front();
        lock.unlock();
        try {
            if (const auto graph = next.lock()) {
                static_cast<void>(graph->instantiate());
            }
        } catch (const std::exception& error) {
            // The graph's replay reports the error.
            VLOG(1) << "vmmgraph: cannot instantiate ahead: " << error.what();
        }
        lock.lock();
    }
}

}  // namespace vmmgraph::torch
