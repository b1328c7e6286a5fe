// Differential test harness, independent of torch. Each scenario runs in a separate process per
// way; notes are compared with the first way, the measure. Crashes, hangs and sticky errors are
// results.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace differential {

// A process's notes, flushed at once. Thread-safe.
class Report {
public:
    explicit Report(int file) : file_(file) {}
    // Numbers repeated keys.
    void note(const std::string& key, const std::string& value);
    // A wrong measure makes its scenario meaningless.
    void check(const std::string& key, bool right) { note(key, right ? "right" : wrong); }
    void skip(const std::string& why);
    // Notes the exception, or "nothing thrown". Returns whether it threw.
    bool attempt(const std::string& key, const std::function<void()>& body);
    // Peak device memory; not compared.
    void memory(std::uint64_t bytes);
    void end();

    static constexpr auto wrong = "WRONG";
    static constexpr auto uncaught = "uncaught";

private:
    void write(char kind, const std::string& key, const std::string& value);

    std::mutex mutex_;
    int file_;
    std::map<std::string, int> used_;
};

// Kind and text of the current exception; see normalised().
std::string describe_exception();
// The first sentence of the first line, with numbers replaced by '#'.
std::string normalised(std::string_view text);

struct Note {
    std::string key;
    std::string value;
};

// Outcome of a scenario in one way.
struct Outcome {
    std::vector<Note> notes;
    // "ok", "signal 11", "exit status 3" or "no end within 60 s".
    std::string end;
    std::string skipped;
    std::string output;
    // Peak device memory, 0 if not reported.
    std::uint64_t memory = 0;
    double seconds = 0;
};

struct Scenario {
    std::string name;
    // Exhausts a resource.
    bool alone = false;
    // The measure itself ends in a fault; ends are compared, too.
    bool ends_badly = false;
};

// An intended difference: a scenario ("*": all), a way, and a prefix of keys.
struct Known {
    std::string scenario;
    std::string way;
    std::string key;
    // If not empty, the way must match the measure of this scenario instead. Such a difference may
    // be absent.
    std::string as_in;
    // A sentence. docs/guarantees.md has a row for the scenario.
    std::string why;
};

struct Difference {
    std::string way;
    std::string key;
    std::string measure;
    std::string other;
    // Index of the matching known difference, or -1.
    int known = -1;
};

struct Verdict {
    std::string scenario;
    // Error of the measure.
    std::string measure;
    std::string skipped;
    // One list per way, without the first.
    std::vector<std::vector<Difference>> differences;
};

using Outcomes = std::map<std::string, std::map<std::string, Outcome>>;

struct Program {
    std::vector<std::string> ways;
    std::vector<Scenario> scenarios;
    std::vector<Known> known;
    std::function<void(const std::string& scenario, const std::string& way, Report& report)> run;
};

struct Limits {
    // 0: slightly fewer than cores.
    int jobs = 0;
    double seconds = 60;
};

// The end is empty if missing.
Outcome read_notes(const std::string& text);
// Starts this program with --scenario, --way and --notes. `only`: part of the names.
Outcomes run_children(const Program& program, const Limits& limits, const std::string& only = {});
std::vector<Verdict> compare(const Program& program, const Outcomes& outcomes);
// Known differences absent from scenarios that ran.
std::vector<Known> stale(const Program& program, const Outcomes& outcomes,
                         const std::vector<Verdict>& verdicts);
// Returns the number of failures.
int print(const Program& program, const Outcomes& outcomes, const std::vector<Verdict>& verdicts);

// Returns the exit status.
int program_main(const Program& program, int argc, char** argv);
bool is_child(const Program& program, int argc, char** argv);

}  // namespace differential
