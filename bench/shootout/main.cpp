// Memory benchmark: runs every cell in a child process (this program with --cell), prints one
// table, writes one JSON array.

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cell.hpp"
#include "options.hpp"
#include "row.hpp"

extern char** environ;

namespace shootout {
namespace {

// Descriptor on which a child writes its row.
constexpr int kRowDescriptor = 3;

void send(const Row& row) {
    const std::string text = row.lines();
    for (std::size_t sent = 0; sent < text.size();) {
        const ssize_t n = write(kRowDescriptor, text.data() + sent, text.size() - sent);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return;
        sent += static_cast<std::size_t>(n);
    }
}

int run_child(const Options& options) {
    Row row;
    try {
        Measurement(options, row).run([&] { send(row); });
        return 0;
    } catch (const std::exception& error) {
        row.set("error", std::string_view(error.what()).substr(0, 400));
        send(row);
        std::fprintf(stderr, "%s %s %s: %s\n", options.cell.set.c_str(), options.cell.way.c_str(),
                     options.cell.order.c_str(), error.what());
        return 1;
    }
}

std::vector<std::string> environment_for(const Cell& cell) {
    std::vector<std::string> variables;
    for (char** variable = environ; *variable != nullptr; ++variable) {
        const std::string_view text = *variable;
        // Each way sets its own allocator configuration.
        if (text.starts_with("PYTORCH_CUDA_ALLOC_CONF=") || text.starts_with("PYTORCH_ALLOC_CONF="))
            continue;
        variables.emplace_back(text);
    }
    if (cell.way == "shared_expandable") {
        variables.emplace_back("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
        variables.emplace_back("PYTORCH_ALLOC_CONF=expandable_segments:True");
    }
    return variables;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts)
        result.push_back(text.data());
    result.push_back(nullptr);
    return result;
}

// Runs the cell in a child process, which fills the row.
void run_cell(int argc, char** argv, const Options& options, const Cell& cell, Row& row) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0)
        throw std::runtime_error(std::string("pipe2: ") + std::strerror(errno));
    // Duplicating a descriptor onto itself would keep close-on-exec, so use a different number.
    const int source = fcntl(ends[1], F_DUPFD_CLOEXEC, 10);
    close(ends[1]);
    std::vector<std::string> arguments(argv, argv + argc);
    arguments.insert(arguments.end(), {"--cell", cell.set, cell.way, cell.order});
    std::vector<std::string> variables = environment_for(cell);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, source, kRowDescriptor);
    pid_t child = 0;
    const int failed = posix_spawn(&child, "/proc/self/exe", &actions, nullptr,
                                   pointers(arguments).data(), pointers(variables).data());
    posix_spawn_file_actions_destroy(&actions);
    close(source);
    if (failed != 0) {
        close(ends[0]);
        throw std::runtime_error(std::string("posix_spawn: ") + std::strerror(failed));
    }

    const auto start = std::chrono::steady_clock::now();
    std::string text;
    bool killed = false;
    for (;;) {
        const double left = options.cell_limit_s - seconds_since(start);
        if (left <= 0 && !killed) {
            kill(child, SIGKILL);
            killed = true;
        }
        pollfd ready{ends[0], POLLIN, 0};
        const int timeout = killed ? -1 : static_cast<int>(std::min(left, 3600.0) * 1000) + 1;
        const int events = poll(&ready, 1, timeout);
        if (events == 0 || (events < 0 && errno == EINTR))
            continue;
        std::array<char, 4096> buffer{};
        const ssize_t n = read(ends[0], buffer.data(), buffer.size());
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    close(ends[0]);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    row.read_lines(text);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    row.set("exit", static_cast<std::int64_t>(code));
    if (killed) {
        row.set("error", "killed at the cell limit");
    } else if (code != 0 && row.shown("error") == "-") {
        row.set("error", text.empty() ? "the process died before its row"
                                      : "the process died after its row");
    }
}

void write_json(const std::string& path, const std::vector<Row>& rows) {
    if (path.empty())
        return;
    std::ofstream file(path, std::ios::trunc);
    file << "[\n";
    for (std::size_t i = 0; i < rows.size(); ++i)
        file << "  " << rows[i].json() << (i + 1 < rows.size() ? ",\n" : "\n");
    file << "]\n";
    if (!file.flush())
        throw std::runtime_error("cannot write " + path);
}

void print_table(const std::vector<Row>& rows) {
    struct Column {
        const char* title;
        const char* key;
    };
    constexpr std::array<Column, 21> columns{{{"set", "set"},
                                              {"way", "way"},
                                              {"order", "order"},
                                              {"physical MiB", "physical_mib"},
                                              {"peak MiB", "peak_mib"},
                                              {"driver MiB", "driver_mib"},
                                              {"exec MiB", "exec_mib"},
                                              {"floor MiB", "floor_mib"},
                                              {"ratio", "ratio"},
                                              {"capture s", "capture_s"},
                                              {"open us", "open_space_us"},
                                              {"calls", "driver_calls"},
                                              {"d1 ms", "replay_ms_d1"},
                                              {"d64 ms", "replay_ms_d64"},
                                              {"d64 host us", "replay_host_us_d64"},
                                              {"d256 ms", "replay_ms_d256"},
                                              {"d512 ms", "replay_ms_d512"},
                                              {"p2048 ms", "replay_ms_p2048"},
                                              {"wrong", "wrong_replays"},
                                              {"inexact", "inexact_replays"},
                                              {"of", "replays_checked"}}};
    std::array<std::size_t, columns.size()> widths{};
    for (std::size_t c = 0; c < columns.size(); ++c) {
        widths[c] = std::strlen(columns[c].title);
        for (const Row& row : rows)
            widths[c] = std::max(widths[c], row.shown(columns[c].key).size());
    }
    const auto line = [&](auto&& cell) {
        for (std::size_t c = 0; c < columns.size(); ++c) {
            std::printf(c < 3 ? "%s%-*s" : "%s%*s", c == 0 ? "" : "  ", static_cast<int>(widths[c]),
                        cell(c).c_str());
        }
    };
    line([&](std::size_t c) { return std::string(columns[c].title); });
    std::printf("\n");
    for (const Row& row : rows) {
        line([&](std::size_t c) { return row.shown(columns[c].key); });
        if (row.shown("error") != "-")
            std::printf("  %s", row.shown("error").c_str());
        std::printf("\n");
    }
    std::fflush(stdout);
}

int run_parent(int argc, char** argv, const Options& options) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<Cell> cells = cells_of(options);
    std::vector<Row> rows;
    bool good = true;
    for (const Cell& cell : cells) {
        Row row;
        row.set("set", cell.set);
        row.set("way", cell.way);
        row.set("order", cell.order);
        if (seconds_since(start) >= options.time_limit_s) {
            row.set("error", "not run: time limit");
        } else {
            std::fprintf(stderr, "[%zu/%zu, %.0f s] %s %s %s\n", rows.size() + 1, cells.size(),
                         seconds_since(start), cell.set.c_str(), cell.way.c_str(),
                         cell.order.c_str());
            run_cell(argc, argv, options, cell, row);
        }
        good = good && row.shown("error") == "-";
        rows.push_back(std::move(row));
        write_json(options.json, rows);
    }
    print_table(rows);
    return good ? 0 : 1;
}

}  // namespace
}  // namespace shootout

int main(int argc, char** argv) {
    try {
        const shootout::Options options = shootout::parse(argc, argv);
        return options.child ? shootout::run_child(options)
                             : shootout::run_parent(argc, argv, options);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "shootout: %s\n", error.what());
        return 2;
    }
}
