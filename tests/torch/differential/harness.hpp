// The same program in several ways: each scenario runs in a process of its own for each way, and what it noted is compared with what it
// noted in the first way, the measure. So a crash, a hang or a sticky error is a result and not the end of the run. Knows no torch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace differential {

// What a process notes; every note is in the file before the next line of the program runs. Any thread.
class Report {
public:
    explicit Report(int file) : file_(file) {}
    // Keys are made unique by a number behind the second one.
    void note(const std::string& key, const std::string& value);
    // For what must be right in the measure too, since a scenario whose measure is wrong shows nothing.
    void check(const std::string& key, bool right) { note(key, right ? "right" : wrong); }
    // The scenario cannot run here.
    void skip(const std::string& why);
    // Runs it and notes the kind and text of what it throws, or "nothing thrown". Whether it threw.
    bool attempt(const std::string& key, const std::function<void()>& body);
    // The most bytes of the device that the scenario took. Shown and not compared.
    void memory(std::uint64_t bytes);
    // The last line: without it the process died.
    void end();

    static constexpr auto wrong = "WRONG";
    static constexpr auto uncaught = "uncaught";

private:
    void write(char kind, const std::string& key, const std::string& value);

    std::mutex mutex_;
    int file_;
    std::map<std::string, int> used_;
};

// Kind and text of the exception that is being handled; see normalised().
std::string describe_exception();
// The first sentence of the first line, with every number replaced by a '#'.
std::string normalised(std::string_view text);

struct Note {
    std::string key;
    std::string value;
};

// What became of one scenario in one way.
struct Outcome {
    std::vector<Note> notes;
    // "ok", "signal 11", "exit status 3" or "no end within 60 s".
    std::string end;
    // Why, if it was skipped.
    std::string skipped;
    // What it printed.
    std::string output;
    // The most bytes of the device that it took, if it said.
    std::uint64_t memory = 0;
    double seconds = 0;
};

struct Scenario {
    std::string name;
    // With nothing beside it: it takes all there is of something.
    bool alone = false;
    // The measure itself is left with a fault that no call survives, so its end is compared like any note.
    bool ends_badly = false;
};

// A difference that is meant. Names a scenario, or all by "*", a way, and how the keys begin.
struct Known {
    std::string scenario;
    std::string way;
    std::string key;
    // If not empty, what the way noted must be what the measure noted in this scenario: it is the measure that is left in a bad state. Such
    // a one need not show.
    std::string as_in;
    // A sentence; docs/guarantees.md has a row for it.
    std::string why;
};

struct Difference {
    std::string way;
    std::string key;
    std::string measure;
    std::string other;
    // The index of the one that explains it, or -1.
    int known = -1;
};

struct Verdict {
    std::string scenario;
    // What is wrong with the measure; empty: nothing.
    std::string measure;
    std::string skipped;
    // By the order of the ways but the first.
    std::vector<std::vector<Difference>> differences;
};

// All outcomes, by scenario and way.
using Outcomes = std::map<std::string, std::map<std::string, Outcome>>;

struct Program {
    std::vector<std::string> ways;
    std::vector<Scenario> scenarios;
    std::vector<Known> known;
    // Runs a scenario in this process.
    std::function<void(const std::string& scenario, const std::string& way, Report& report)> run;
};

struct Limits {
    // As many as there are cores, but a few: a process starts for seconds.
    int jobs = 0;
    double seconds = 60;
};

// What was told in a file of notes; the end is empty if the process did not say it.
Outcome read_notes(const std::string& text);
// Runs the scenarios whose names contain `only`, in child processes: this program with --scenario, --way and --notes.
Outcomes run_children(const Program& program, const Limits& limits, const std::string& only = {});
// One for each scenario that has outcomes.
std::vector<Verdict> compare(const Program& program, const Outcomes& outcomes);
// Known differences that did not show, of scenarios that ran in that way.
std::vector<Known> stale(const Program& program, const Outcomes& outcomes, const std::vector<Verdict>& verdicts);
// The table, what differs in full, and a last line of counts. How much is wrong.
int print(const Program& program, const Outcomes& outcomes, const std::vector<Verdict>& verdicts);

// The exit status of a program that is this and nothing else.
int program_main(const Program& program, int argc, char** argv);
// Whether these are the arguments of a child; if so, it has run.
bool is_child(const Program& program, int argc, char** argv);

}  // namespace differential
