// A thread that instantiates graphs before they are launched.
#pragma once

#include <memory>
#include <thread>

namespace vmmgraph::torch {

class Template;

class Instantiator {
public:
    Instantiator();
    Instantiator(const Instantiator&) = delete;
    Instantiator& operator=(const Instantiator&) = delete;
    // Waits for an instantiation that is under way, unless that is what ends it.
    ~Instantiator();

    // Queues a graph that may be launched soon. Of more than eight the oldest is dropped.
    void ask(std::weak_ptr<Template> graph);

private:
    struct Queue;
    static void work(const std::shared_ptr<Queue>& queue);

    std::shared_ptr<Queue> queue_;
    // From the first question on.
    std::thread thread_;
};

}  // namespace vmmgraph::torch
