// Process-wide behaviour under LD_PRELOAD=libvmmgraph_memory_saver.so. `process_test <how>` exits
// with 0 on success.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "saver.hpp"

namespace {

using saver::MiB;

saver::Functions tms;
int wrong = 0;

void expect(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "not so: %s\n", what);
        wrong = 1;
    }
}

void* allocate() {
    void* block = nullptr;
    tms.tms_set_interesting_region(true);
    tms.tms_set_enable_cpu_backup(true);
    expect(cudaMalloc(&block, MiB) == 0 && block != nullptr, "memory in a region");
    tms.tms_set_interesting_region(false);
    return block;
}

// Returns the exit code; kills a hung child.
template <class Body>
int child(Body body) {
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        wrong = 0;
        body();
        std::exit(wrong);
    }
    int status = 0;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status)
                                                                           : 99;
}

// Frees a block after all other statics.
struct Last {
    ~Last() {
        if (block != nullptr && cudaFree(block) != 0) {
            std::fputs("a block cannot be freed at the end\n", stderr);
            std::_Exit(3);
        }
    }
    void* block = nullptr;
} last;

void paused() {
    last.block = allocate();
    static_cast<void>(allocate());
    expect(tms.tms_pause(nullptr) == 0, "a pause");
}

void threads() {
    for (int i = 0; i < 2; ++i) {
        std::thread([] {
            for (;;) {
                static_cast<void>(cudaFree(allocate()));
            }
        }).detach();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

void forks() {
    expect(child([] { static_cast<void>(cudaFree(allocate())); }) == 0,
           "a child of a process without regions has its own");
    void* const block = allocate();
    saver::fill(block, MiB, 7);
    std::atomic<bool> stop{false};
    std::thread busy([&stop] {
        while (!stop) {
            static_cast<void>(cudaFree(allocate()));
        }
    });
    for (int i = 0; i < 50 && wrong == 0; ++i) {
        const int end = child([block] {
            const auto frees = fake_frees();
            void* none = nullptr;
            tms.tms_set_current_tag("a child's");
            tms.tms_set_interesting_region(true);
            expect(cudaMalloc(&none, MiB) == 3, "no region in the child");
            expect(tms.tms_torch_malloc(MiB, 0, nullptr) == nullptr &&
                       tms.tms_last_error(nullptr) == 3,
                   "nor for torch");
            expect(tms.tms_pause(nullptr) == 3 && tms.tms_resume(nullptr) == 3,
                   "no pause and no resume in the child");
            expect(tms.tms_get_cpu_backup_pointer(static_cast<std::uint8_t*>(block), 1) == nullptr,
                   "no backup in the child");
            expect(tms.tms_last_error(nullptr) == 3, "which is said");
            expect(cudaFree(block) == 1 && fake_frees() == frees + 1,
                   "the parent's block is not touched");
        });
        expect(end == 0, "a child that is told so and ends");
    }
    stop = true;
    busy.join();
    expect(saver::holds(block, MiB, 7), "the parent does not notice");
    expect(cudaFree(block) == 0, "its block is freed");
}

void environment() {
    expect(tms.tms_get_interesting_region() && tms.tms_get_enable_cpu_backup(),
           "the environment's settings");
    expect(std::string(tms.tms_get_cpu_backup_backend()) == "mmap", "its backend");
    expect(tms.tms_get_retain_cpu_backup(), "that backups are retained");
    std::thread([] {
        expect(tms.tms_get_interesting_region() && tms.tms_get_enable_cpu_backup(),
               "for every thread");
    }).join();
    const auto mallocs = fake_mallocs();
    void* block = nullptr;
    expect(cudaMalloc(&block, MiB) == 0 && fake_mallocs() == mallocs,
           "the first allocation is in a region");
    expect(cudaFree(block) == 0, "and freed");
}

void wrong_environment() {
    expect(!tms.tms_get_interesting_region() && !tms.tms_get_enable_cpu_backup(),
           "what cannot be read is false");
    expect(std::string(tms.tms_get_cpu_backup_backend()) == "pinned",
           "the backend is the default one");
    expect(tms.tms_last_error(nullptr) != 0, "which is said");
}

}  // namespace

int main(int argc, char** argv) {
    const std::string how = argc > 1 ? argv[1] : "";
    if (!tms.look_up(RTLD_DEFAULT)) {
        std::fputs("the library is not preloaded\n", stderr);
        return 2;
    }
    if (how == "paused") {
        paused();
    } else if (how == "threads") {
        threads();
    } else if (how == "forks") {
        forks();
    } else if (how == "environment") {
        environment();
    } else if (how == "wrong_environment") {
        wrong_environment();
    } else {
        std::fprintf(stderr, "no such way: %s\n", how.c_str());
        return 2;
    }
    return wrong;
}
