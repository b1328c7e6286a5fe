// Exchange of decisions between ranks which are threads.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include <vmmgraph/engine.hpp>

namespace engine_tests {

using vmmgraph::engine::Decision;

// All-gather of decisions between threads.
class Gather {
public:
    explicit Gather(std::size_t ranks) : ranks_(ranks) {}
    std::vector<Decision> operator()(const Decision& mine) {
        std::unique_lock lock(mutex_);
        const auto round = round_;
        here_.push_back(mine);
        if (here_.size() == ranks_) {
            all_ = std::exchange(here_, {});
            ++round_;
            complete_.notify_all();
        } else {
            complete_.wait(lock, [&] { return round_ != round; });
        }
        return all_;
    }

private:
    std::size_t ranks_;
    std::size_t round_ = 0;
    std::mutex mutex_;
    std::condition_variable complete_;
    std::vector<Decision> here_;
    std::vector<Decision> all_;
};

}  // namespace engine_tests
