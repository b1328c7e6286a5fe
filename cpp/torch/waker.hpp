// A thread that sees to it that graphs have executables before they are launched.
#pragma once

#include <memory>
#include <thread>

namespace vmmgraph::torch {

class Template;

class Waker {
public:
    Waker();
    Waker(const Waker&) = delete;
    Waker& operator=(const Waker&) = delete;
    // Waits for what is being woken, unless that is what ends it.
    ~Waker();

    // Asks for one that may be needed soon; whoever asks for many is forgotten, the oldest first.
    void ask(std::weak_ptr<Template> graph);

private:
    struct Queue;
    static void work(const std::shared_ptr<Queue>& queue);

    std::shared_ptr<Queue> queue_;
    // From the first question on.
    std::thread thread_;
};

}  // namespace vmmgraph::torch
