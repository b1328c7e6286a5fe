// Compares outcomes, matches known differences, and prints the table.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "harness.hpp"

namespace differential {
namespace {

constexpr auto missing = "(nothing)";

const std::string* find(const Outcome& outcome, const std::string& key) {
    const auto note = std::find_if(outcome.notes.begin(), outcome.notes.end(),
                                   [&](const Note& one) { return one.key == key; });
    return note == outcome.notes.end() ? nullptr : &note->value;
}

const Outcome* find(const Outcomes& outcomes, const std::string& scenario, const std::string& way) {
    const auto ways = outcomes.find(scenario);
    if (ways == outcomes.end()) {
        return nullptr;
    }
    const auto outcome = ways->second.find(way);
    return outcome == ways->second.end() ? nullptr : &outcome->second;
}

bool names(const std::string& pattern, const std::string& name) {
    return pattern == "*" || pattern == name;
}

std::vector<Difference> differences(const std::string& way, const Outcome& measure,
                                    const Outcome& other) {
    std::vector<Difference> found;
    for (const auto& [key, value] : measure.notes) {
        const auto* const theirs = find(other, key);
        if (theirs == nullptr || *theirs != value) {
            found.push_back({way, key, value, theirs == nullptr ? missing : *theirs});
        }
    }
    for (const auto& [key, value] : other.notes) {
        if (find(measure, key) == nullptr) {
            found.push_back({way, key, missing, value});
        }
    }
    if (measure.end != other.end) {
        found.push_back({way, "end", measure.end, other.end});
    }
    if (measure.skipped != other.skipped) {
        found.push_back({way, "skipped", measure.skipped, other.skipped});
    }
    return found;
}

// Error of the measure.
std::string complaint(const Scenario& scenario, const Outcome& measure) {
    if (scenario.ends_badly) {
        return {};
    }
    for (const auto& [key, value] : measure.notes) {
        if (value == Report::wrong || key == Report::uncaught) {
            return key + ": " + value;
        }
    }
    return measure.end == "ok" ? std::string() : measure.end;
}

std::string shortened(const std::string& text, std::size_t most) {
    return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

// A star marks more than 5 % and a constant above the measure: an arena's cuBLAS workspace of 32
// MiB and two pages.
std::string memory(const Program& program, const std::map<std::string, Outcome>& ways) {
    constexpr double MiB = 1 << 20, constant = 36;
    const auto measure = static_cast<double>(ways.at(program.ways.front()).memory) / MiB;
    std::string text;
    bool said = false;
    for (const auto& way : program.ways) {
        const auto held = static_cast<double>(ways.at(way).memory) / MiB;
        said |= held != 0;
        text += (text.empty() ? "" : "/") + std::to_string(std::lround(held)) +
                (held > measure * 1.05 + constant ? "*" : "");
    }
    return said ? text : "";
}

std::string tail(const std::string& text, int lines) {
    auto at = text.size();
    for (int i = 0; i <= lines && at != 0 && at != std::string::npos; ++i) {
        at = text.rfind('\n', at - 1);
    }
    return at == 0 || at == std::string::npos ? text : text.substr(at + 1);
}

}  // namespace

std::vector<Verdict> compare(const Program& program, const Outcomes& outcomes) {
    std::vector<Verdict> verdicts;
    for (const auto& scenario : program.scenarios) {
        const auto* const measure = find(outcomes, scenario.name, program.ways.front());
        if (measure == nullptr) {
            continue;
        }
        Verdict verdict{scenario.name, complaint(scenario, *measure), measure->skipped, {}};
        for (std::size_t i = 1; i < program.ways.size(); ++i) {
            const auto& way = program.ways[i];
            auto found = differences(way, *measure, outcomes.at(scenario.name).at(way));
            for (auto& difference : found) {
                for (std::size_t k = 0; k < program.known.size() && difference.known < 0; ++k) {
                    const auto& known = program.known[k];
                    if (!names(known.scenario, scenario.name) || !names(known.way, way) ||
                        difference.key.rfind(known.key, 0) != 0) {
                        continue;
                    }
                    if (!known.as_in.empty()) {
                        const auto* const sound = find(outcomes, known.as_in, program.ways.front());
                        const auto* const value =
                            sound == nullptr ? nullptr : find(*sound, difference.key);
                        if (value == nullptr || *value != difference.other) {
                            continue;
                        }
                    }
                    difference.known = static_cast<int>(k);
                }
            }
            verdict.differences.push_back(std::move(found));
        }
        verdicts.push_back(std::move(verdict));
    }
    for (auto& verdict : verdicts) {
        const auto excused = [&](const Known& known) {
            return !known.as_in.empty() && names(known.scenario, verdict.scenario) &&
                   verdict.measure.rfind(known.key, 0) == 0;
        };
        if (!verdict.measure.empty() &&
            std::any_of(program.known.begin(), program.known.end(), excused)) {
            verdict.measure.clear();
        }
    }
    return verdicts;
}

std::vector<Known> stale(const Program& program, const Outcomes& outcomes,
                         const std::vector<Verdict>& verdicts) {
    std::set<int> used;
    for (const auto& verdict : verdicts) {
        for (const auto& way : verdict.differences) {
            for (const auto& difference : way) {
                used.insert(difference.known);
            }
        }
    }
    std::vector<Known> unused;
    for (std::size_t k = 0; k < program.known.size(); ++k) {
        const auto& known = program.known[k];
        const auto* const ran = find(outcomes, known.scenario, program.ways.front());
        // With `as_in` set, the difference may be absent.
        const bool judged = known.as_in.empty() && ran != nullptr && ran->skipped.empty();
        if (judged && used.count(static_cast<int>(k)) == 0) {
            unused.push_back(known);
        }
    }
    return unused;
}

int print(const Program& program, const Outcomes& outcomes, const std::vector<Verdict>& verdicts) {
    int wrong = 0, known = 0, skipped = 0, more = 0;
    double slowest = 0;
    std::printf("%-58s", "scenario");
    for (const auto& way : program.ways) {
        std::printf(" %-8s", way.c_str());
    }
    std::printf(" %-20s first difference\n", "MiB");
    for (const auto& verdict : verdicts) {
        std::printf("%-58s", verdict.scenario.c_str());
        const bool passed_over = !verdict.skipped.empty();
        skipped += passed_over;
        wrong += !verdict.measure.empty();
        std::printf(" %-8s", passed_over ? "skipped" : verdict.measure.empty() ? "ok" : "FAILS");
        std::string first = passed_over ? verdict.skipped : verdict.measure;
        bool first_is_known = true;
        for (const auto& way : verdict.differences) {
            const auto unknown = std::find_if(way.begin(), way.end(),
                                              [](const Difference& one) { return one.known < 0; });
            const bool differs = unknown != way.end();
            wrong += differs;
            known += !differs && !way.empty();
            std::printf(" %-8s", differs        ? "DIFFERS"
                                 : !way.empty() ? "known"
                                 : passed_over  ? "skipped"
                                                : "agree");
            if (!way.empty() && (first.empty() || (differs && first_is_known))) {
                const auto& one = differs ? *unknown : way.front();
                first = one.way + ", " + one.key + ": " + shortened(one.measure, 60) + " | " +
                        shortened(one.other, 60);
                first_is_known = !differs;
            }
        }
        const auto held = memory(program, outcomes.at(verdict.scenario));
        more += held.find('*') != std::string::npos;
        std::printf(" %-20s %s\n", held.c_str(), first.c_str());
    }
    for (const auto& verdict : verdicts) {
        for (const auto& way : verdict.differences) {
            const bool differs = std::any_of(way.begin(), way.end(),
                                             [](const Difference& one) { return one.known < 0; });
            for (const auto& one : way) {
                std::printf("\n%s, %s, %s%s\n  %s: %s\n  %s: %s\n", verdict.scenario.c_str(),
                            one.way.c_str(), one.key.c_str(), one.known < 0 ? "" : " (known)",
                            program.ways.front().c_str(), one.measure.c_str(), one.way.c_str(),
                            one.other.c_str());
                if (one.known >= 0) {
                    std::printf("  %s\n", program.known[one.known].why.c_str());
                }
            }
            if (differs) {
                std::printf(
                    "  it printed last:\n%s\n",
                    tail(outcomes.at(verdict.scenario).at(way.front().way).output, 8).c_str());
            }
        }
        if (!verdict.measure.empty()) {
            std::printf(
                "\n%s fails in the measure: %s\n%s\n", verdict.scenario.c_str(),
                verdict.measure.c_str(),
                tail(outcomes.at(verdict.scenario).at(program.ways.front()).output, 8).c_str());
        }
    }
    for (const auto& one : stale(program, outcomes, verdicts)) {
        std::printf("\nknown, but it agrees: %s, %s, %s: %s\n", one.scenario.c_str(),
                    one.way.c_str(), one.key.c_str(), one.why.c_str());
        ++wrong;
    }
    std::string slow;
    for (const auto& [scenario, ways] : outcomes) {
        for (const auto& [way, outcome] : ways) {
            if (outcome.seconds > slowest) {
                slowest = outcome.seconds;
                slow = scenario + ", " + way;
            }
        }
    }
    std::printf("\nslowest: %s, %.1f s\n", slow.c_str(), slowest);
    std::printf(
        "RESULT differential: %zu scenarios, %d differences, %d known, %d skipped, %d with more "
        "memory\n",
        verdicts.size(), wrong, known, skipped, more);
    std::fflush(stdout);
    return wrong;
}

int program_main(const Program& program, int argc, char** argv) {
    if (is_child(program, argc, argv)) {
        return 0;
    }
    const auto number = [](const char* name, double otherwise) {
        const char* const text = std::getenv(name);
        return text == nullptr || *text == '\0' ? otherwise : std::strtod(text, nullptr);
    };
    Limits limits;
    limits.jobs = static_cast<int>(number("VMMGRAPH_DIFFERENTIAL_JOBS", limits.jobs));
    limits.seconds = number("VMMGRAPH_DIFFERENTIAL_TIMEOUT", limits.seconds);
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string_view name = argv[i];
        if (name == "--list") {
            for (const auto& scenario : program.scenarios) {
                std::printf("%s\n", scenario.name.c_str());
            }
            return 0;
        }
        if (name != "--only" || i + 1 == argc) {
            std::fprintf(stderr,
                         "usage: %s [--list] [--only PART_OF_A_NAME] [--scenario NAME --way WAY]\n",
                         argv[0]);
            return 2;
        }
        only = argv[++i];
    }
    const auto outcomes = run_children(program, limits, only);
    const auto verdicts = compare(program, outcomes);
    if (verdicts.empty()) {
        std::fprintf(stderr, "no scenario is called like %s\n", only.c_str());
        return 2;
    }
    return print(program, outcomes, verdicts) == 0 ? 0 : 1;
}

}  // namespace differential
