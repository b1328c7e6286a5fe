// Child processes, each with files, a process group and a time limit.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.hpp"

namespace differential {
namespace {

using Clock = std::chrono::steady_clock;

struct Folder {
    std::string path = (std::filesystem::temp_directory_path() / "differential.XXXXXX").string();
    Folder() {
        if (mkdtemp(path.data()) == nullptr) {
            throw std::runtime_error(std::string("no folder for notes: ") + std::strerror(errno));
        }
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
};

struct Task {
    const Scenario* scenario;
    std::string way;
};

struct Child {
    Task task;
    std::string stem;
    pid_t process;
    Clock::time_point start;
    bool killed = false;
};

std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

Child start(const Task& task, const std::string& stem) {
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    const std::string notes = stem + ".notes", output = stem + ".output";
    std::fflush(nullptr);
    const pid_t process = fork();
    if (process < 0) {
        throw std::runtime_error(std::string("no process: ") + std::strerror(errno));
    }
    if (process == 0) {
        setpgid(0, 0);
        // Dies with the parent.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int file = open(output.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
        dup2(file, STDOUT_FILENO);
        dup2(file, STDERR_FILENO);
        execl(program.c_str(), program.c_str(), "--scenario", task.scenario->name.c_str(), "--way",
              task.way.c_str(), "--notes", notes.c_str(), static_cast<char*>(nullptr));
        _exit(127);
    }
    setpgid(process, process);
    return {task, stem, process, Clock::now()};
}

Outcome finish(const Child& child, int status, double limit) {
    auto outcome = read_notes(content(child.stem + ".notes"));
    outcome.output = content(child.stem + ".output");
    outcome.seconds = std::chrono::duration<double>(Clock::now() - child.start).count();
    if (child.killed) {
        outcome.end = "no end within " + std::to_string(std::lround(limit)) + " s";
    } else if (WIFSIGNALED(status)) {
        outcome.end = "signal " + std::to_string(WTERMSIG(status));
    } else if (WEXITSTATUS(status) != 0) {
        outcome.end = "exit status " + std::to_string(WEXITSTATUS(status));
    } else if (outcome.end.empty()) {
        outcome.end = "exit status 0 before its end";
    }
    return outcome;
}

}  // namespace

Outcomes run_children(const Program& program, const Limits& limits, const std::string& only) {
    std::deque<Task> together, alone;
    for (const auto& scenario : program.scenarios) {
        const auto compared = [&](const Known& known) { return known.as_in == scenario.name; };
        if (scenario.name.find(only) != std::string::npos ||
            std::any_of(program.known.begin(), program.known.end(), compared)) {
            for (const auto& way : program.ways) {
                (scenario.alone ? alone : together).push_back({&scenario, way});
            }
        }
    }
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int jobs = limits.jobs > 0 ? limits.jobs : std::clamp(cores - 2, 2, 14);
    const Folder folder;
    Outcomes outcomes;
    std::vector<Child> running;
    int number = 0;
    while (!together.empty() || !alone.empty() || !running.empty()) {
        const auto begin = [&](std::deque<Task>& tasks) {
            running.push_back(start(tasks.front(), folder.path + '/' + std::to_string(number++)));
            tasks.pop_front();
        };
        while (!together.empty() && running.size() < static_cast<std::size_t>(jobs)) {
            begin(together);
        }
        if (running.empty()) {
            begin(alone);
        }
        for (auto child = running.begin(); child != running.end();) {
            int status = 0;
            if (waitpid(child->process, &status, WNOHANG) == child->process) {
                // Kills the child's own children.
                kill(-child->process, SIGKILL);
                outcomes[child->task.scenario->name][child->task.way] =
                    finish(*child, status, limits.seconds);
                child = running.erase(child);
                continue;
            }
            if (!child->killed &&
                std::chrono::duration<double>(Clock::now() - child->start).count() >
                    limits.seconds) {
                child->killed = true;
                kill(-child->process, SIGKILL);
            }
            ++child;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return outcomes;
}

bool is_child(const Program& program, int argc, char** argv) {
    std::string scenario, way, notes;
    for (int i = 1; i + 1 < argc; ++i) {
        const std::string_view name = argv[i];
        std::string* const value = name == "--scenario" ? &scenario
                                   : name == "--way"    ? &way
                                   : name == "--notes"  ? &notes
                                                        : nullptr;
        if (value != nullptr) {
            *value = argv[++i];
        }
    }
    if (scenario.empty()) {
        return false;
    }
    // Without --notes (manual use), prints the notes.
    const int file = notes.empty()
                         ? STDOUT_FILENO
                         : open(notes.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) {
        throw std::runtime_error("cannot write " + notes);
    }
    Report report(file);
    program.run(scenario, way, report);
    report.end();
    return true;
}

}  // namespace differential
