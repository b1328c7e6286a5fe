// The harness with ways that differ, crash, hang and throw on purpose. Needs neither GPU nor torch.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include "harness.hpp"
#include "known.hpp"

namespace differential {
namespace {

struct Strange {
    int number;
};

// "first" is the measure, "second" agrees, "third" misbehaves.
void run(const std::string& scenario, const std::string& way, Report& report) {
    const bool third = way == "third";
    if (scenario == "skips") {
        return report.skip("one device here");
    }
    report.note("begin", "line one\nline two\twith a tab and a \\n");
    if (scenario == "differs") {
        report.note("value", third ? "2" : "1");
        report.memory((third ? 79u : 40u) << 20);
    } else if (scenario == "holds_more") {
        report.memory((third ? 77u : 40u) << 20);
    } else if (scenario == "lacks") {
        if (!third) {
            report.note("value", "1");
        }
    } else if (scenario == "adds") {
        if (third) {
            report.note("value", "1");
        }
    } else if (scenario == "repeats") {
        report.note("value", "1");
        report.note("value", third ? "2" : "1");
    } else if (scenario == "crashes" && third) {
        // Debuggers and sanitizers must not change the exit.
        std::signal(SIGSEGV, SIG_DFL);
        std::raise(SIGSEGV);
    } else if (scenario == "aborts" && third) {
        std::signal(SIGABRT, SIG_DFL);
        std::fputs("a last word\n", stderr);
        std::abort();
    } else if (scenario == "hangs" && third) {
        if (fork() == 0) {
            sleep(600);
        }
        sleep(600);
    } else if (scenario == "exits" && third) {
        _exit(3);
    } else if (scenario == "exits_quietly" && third) {
        _exit(0);
    } else if (scenario == "throws") {
        report.attempt("thrown", [&] {
            if (third) {
                throw std::out_of_range("went wrong at 0x7f12 with 3.50 GiB. Try again.\nmore");
            }
            throw std::runtime_error("went wrong at 0xab with 12 GiB. Try later.\nelse");
        });
        report.attempt("thrown otherwise", [&] { throw Strange{1}; });
    } else if (scenario == "is_wrong") {
        report.check("sum", way != "first");
    } else if (scenario == "measure_dies" && way == "first") {
        _exit(4);
    } else if (scenario == "ends_badly") {
        _exit(9);
    } else if (scenario == "partly_known") {
        report.note("known: a", third ? "2" : "1");
        report.note("other", third ? "2" : "1");
    } else if (scenario == "known_if_sound") {
        report.check("after: state", way != "first");
    } else if (scenario == "known_if_sound_but_is_not") {
        report.note("after: state", way == "first" ? Report::wrong : third ? "strange" : "right");
    } else if (scenario == "sound") {
        report.check("after: state", true);
    }
}

Program program() {
    Program program{{"first", "second", "third"}, {}, {}, run};
    for (const auto* const name :
         {"agrees", "differs", "lacks", "adds", "repeats", "holds_more", "crashes", "aborts",
          "hangs", "exits", "exits_quietly", "throws", "is_wrong", "measure_dies", "partly_known",
          "known_if_sound", "known_if_sound_but_is_not", "sound", "skips"}) {
        program.scenarios.push_back({name});
    }
    program.scenarios.push_back({"ends_badly", true, true});
    program.known = {
        {"differs", "third", "value", "", "Its numbers are others."},
        {"partly_known", "third", "known:", "", "Only this one."},
        {"known_if_sound", "*", "after:", "sound", "The measure is left in a bad state."},
        {"known_if_sound_but_is_not", "*", "after:", "sound",
         "The measure is left in a bad state."},
        {"agrees", "third", "value", "", "It does not show."},
        {"skips", "third", "value", "", "It cannot show."},
        {"throws", "third", "after:", "sound", "It need not show."},
    };
    return program;
}

class Harness : public testing::Test {
protected:
    static void SetUpTestSuite() {
        const auto start = std::chrono::steady_clock::now();
        outcomes_ = run_children(program(), {6, 2});
        seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        verdicts_ = compare(program(), outcomes_);
    }

    static const Verdict& verdict(const std::string& name) {
        return *std::find_if(verdicts_.begin(), verdicts_.end(),
                             [&](const Verdict& one) { return one.scenario == name; });
    }
    // "key: measure | other", with a star if known.
    static std::string third(const std::string& name) {
        const auto& found = verdict(name).differences.at(1);
        if (found.empty()) {
            return "";
        }
        return found[0].key + ": " + found[0].measure + " | " + found[0].other +
               (found[0].known >= 0 ? " *" : "");
    }

    static inline Outcomes outcomes_;
    static inline std::vector<Verdict> verdicts_;
    static inline double seconds_ = 0;
};

TEST_F(Harness, WhatIsTheSameAgrees) {
    EXPECT_EQ(verdicts_.size(), program().scenarios.size());
    EXPECT_EQ(third("agrees"), "");
    EXPECT_EQ(verdict("agrees").measure, "");
    ASSERT_EQ(outcomes_["agrees"]["third"].notes.size(), 1u);
    EXPECT_EQ(outcomes_["agrees"]["third"].notes[0].value,
              "line one\nline two\twith a tab and a \\n");
    for (const auto& one : verdicts_) {
        const bool measure_differs = one.scenario == "is_wrong" || one.scenario == "measure_dies" ||
                                     one.scenario.rfind("known_if", 0) == 0;
        EXPECT_EQ(one.differences.at(0).empty(), !measure_differs) << one.scenario;
    }
}

TEST_F(Harness, WhatIsNotedOtherwiseDiffers) {
    EXPECT_EQ(third("differs"), "value: 1 | 2 *");
    EXPECT_EQ(third("lacks"), "value: 1 | (nothing)");
    EXPECT_EQ(third("adds"), "value: (nothing) | 1");
    EXPECT_EQ(third("repeats"), "value #2: 1 | 2");
}

TEST_F(Harness, AnEndIsAResultAndNotTheEndOfTheRun) {
    EXPECT_EQ(third("crashes"), "end: ok | signal 11");
    EXPECT_EQ(third("aborts"), "end: ok | signal 6");
    EXPECT_EQ(outcomes_["aborts"]["third"].output, "a last word\n");
    EXPECT_EQ(third("hangs"), "end: ok | no end within 2 s");
    EXPECT_EQ(third("exits"), "end: ok | exit status 3");
    EXPECT_EQ(third("exits_quietly"), "end: ok | exit status 0 before its end");
    EXPECT_EQ(third("ends_badly"), "");
    EXPECT_EQ(verdict("ends_badly").measure, "");
    EXPECT_EQ(outcomes_["crashes"]["third"].notes.size(), 1u);
    EXPECT_LT(seconds_, 60);
}

TEST_F(Harness, ExceptionsAreComparedByKindAndText) {
    EXPECT_EQ(third("throws"),
              "thrown: std::runtime_error: went wrong at # with # GiB | std::out_of_range: went "
              "wrong at # with # GiB");
    EXPECT_EQ(outcomes_["throws"]["first"].notes.at(2).value,
              "differential::(anonymous namespace)::Strange");
    EXPECT_EQ(normalised("CUDA out of memory. Tried to allocate 3 GiB"), "CUDA out of memory");
    EXPECT_EQ(normalised("at 1.5 and 0xFFab12, x2\nsecond line"), "at # and #, x#");
}

TEST_F(Harness, AMeasureThatIsWrongShowsNothing) {
    EXPECT_EQ(verdict("is_wrong").measure, "sum: WRONG");
    EXPECT_EQ(verdict("measure_dies").measure, "exit status 4");
}

TEST_F(Harness, OnlyWhatIsListedIsKnown) {
    const auto& partly = verdict("partly_known").differences.at(1);
    ASSERT_EQ(partly.size(), 2u);
    EXPECT_GE(partly[0].known, 0);
    EXPECT_LT(partly[1].known, 0);
    EXPECT_EQ(third("known_if_sound"), "after: state: WRONG | right *");
    EXPECT_EQ(verdict("known_if_sound").measure, "");
    EXPECT_EQ(third("known_if_sound_but_is_not"), "after: state: WRONG | strange");
}

TEST_F(Harness, AKnownDifferenceThatDoesNotShowIsStale) {
    const auto unused = stale(program(), outcomes_, verdicts_);
    ASSERT_EQ(unused.size(), 1u);
    EXPECT_EQ(unused[0].scenario, "agrees");
}

TEST_F(Harness, TheLastLineCounts) {
    testing::internal::CaptureStdout();
    const int wrong = print(program(), outcomes_, verdicts_);
    const auto text = testing::internal::GetCapturedStdout();
    // Two wrong measures and their differences in both ways, ten of the third way, one stale entry.
    EXPECT_EQ(wrong, 2 + 4 + 11 + 1);
    EXPECT_NE(text.find("RESULT differential: 20 scenarios, 18 differences, 4 known, 1 skipped, 1 "
                        "with more memory\n"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find(" 40/40/79* "), std::string::npos) << text;
    EXPECT_NE(text.find(" 40/40/77 "), std::string::npos) << text;
    EXPECT_NE(text.find("a last word"), std::string::npos);
    EXPECT_NE(text.find("one device here"), std::string::npos);
}

TEST_F(Harness, AFilterRunsWhatItNamesAndWhatThatIsComparedWith) {
    const auto some = run_children(program(), {2, 2}, "known_if_sound_but");
    ASSERT_EQ(some.size(), 2u);
    EXPECT_EQ(some.count("sound"), 1u);
}

TEST(Known, IsDocumented) {
    std::ifstream file(GUARANTEES);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    ASSERT_FALSE(text.empty()) << GUARANTEES;
    for (const auto& known : known_differences()) {
        EXPECT_NE(known.why, "");
        // A "*" entry names a scenario in `as_in`.
        const auto& scenario = known.scenario == "*" ? known.as_in : known.scenario;
        EXPECT_NE(text.find('`' + scenario + '`'), std::string::npos)
            << scenario << " is not in docs/guarantees.md";
    }
}

}  // namespace
}  // namespace differential

int main(int argc, char** argv) {
    const auto all = differential::program();
    if (differential::is_child(all, argc, argv)) {
        return 0;
    }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
