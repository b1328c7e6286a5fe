// A child forked while other threads hold the library's locks: calls are refused with a reason,
// exits do not hang, and the parent is unaffected.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "host.hpp"

namespace {

// Destroyed by exit, also in the child.
std::unique_ptr<vmmgraph::SharedVmmAllocator> held;
std::vector<vmmgraph::Space> spaces;

template <class Body>
int refused(Body body) {
    try {
        body();
    } catch (const vmmgraph::Error& error) {
        const std::string text = error.what();
        const bool says_why = text.find("fork") != std::string::npos;
        return error.status() == VMMGRAPH_ERROR_WRONG_STATE && says_why ? 0 : 3;
    }
    return 4;
}

int child() {
    alarm(20);
    int wrong = refused([] { static_cast<void>(held->open_space()); });
    wrong |= refused([] { static_cast<void>(spaces.front().allocate(host::MiB)); });
    wrong |= refused([] { static_cast<void>(held->stats()); });
    wrong |= refused([] { static_cast<void>(vmmgraph::SharedVmmAllocator(0, host::options())); });
    wrong |= vmmgraph_device_close(nullptr) == VMMGRAPH_ERROR_WRONG_STATE ? 0 : 5;
    return wrong;
}

// Exit code, or 100 plus the signal number.
int end_of(pid_t pid) {
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) {
        return 99;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

// Legal before the parent opens a device.
int child_of_its_own() {
    alarm(20);
    auto arena = host::arena();
    auto space = arena.open_space();
    void* const block = space.allocate(host::MiB);
    host::fill(block, host::MiB, 3);
    return host::holds(block, host::MiB, 3) ? 0 : 6;
}

}  // namespace

int main() {
    const pid_t first = fork();
    if (first == 0) {
        std::_Exit(child_of_its_own());
    }
    if (const int end = end_of(first); end != 0) {
        std::fprintf(stderr, "a child forked before the first use: %d\n", end);
        return 1;
    }

    held = std::make_unique<vmmgraph::SharedVmmAllocator>(host::arena());
    spaces.push_back(held->open_space());
    void* const block = spaces.front().allocate(host::MiB);
    host::fill(block, host::MiB, 7);

    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&stop] {
            while (!stop) {
                auto space = held->open_space();
                for (int n = 0; n < 8; ++n) {
                    static_cast<void>(space.allocate(100000));
                }
                static_cast<void>(held->stats_json());
            }
        });
    }
    int failed = 0;
    for (int i = 0; i < 100 && failed == 0; ++i) {
        std::fflush(nullptr);
        const pid_t pid = fork();
        if (pid == 0) {
            const int code = child();
            // Also destroys the parent's spaces and arena.
            i % 2 == 0 ? std::exit(code) : std::_Exit(code);
        }
        failed = end_of(pid);
    }
    stop = true;
    for (auto& thread : threads) {
        thread.join();
    }
    if (failed != 0) {
        std::fprintf(stderr, "a child ended with %d\n", failed);
        return 1;
    }
    if (!host::holds(block, host::MiB, 7)) {
        std::fputs("a child touched the parent's block\n", stderr);
        return 1;
    }
    spaces.front().free(block);
    return 0;
}
