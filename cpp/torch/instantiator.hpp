// Thread for instantiating graphs ahead of their launch.
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
    // Waits for a running instantiation, unless called from within one.
    ~Instantiator();

    // Queues a graph that may be launched soon. If more than eight wait, drops the oldest.
    void ask(std::weak_ptr<Template> graph);

private:
    struct Queue;
    static void work(const std::shared_ptr<Queue>& queue);

    std::shared_ptr<Queue> queue_;
    std::thread thread_;
};

}  // namespace vmmgraph::torch
