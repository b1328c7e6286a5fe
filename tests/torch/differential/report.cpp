// Writes and parses the notes of a process.
#include <cctype>
#include <cstdlib>
#include <exception>
#include <sstream>

#include <cxxabi.h>
#include <unistd.h>

#include "harness.hpp"

namespace differential {
namespace {

std::string escaped(const std::string& text) {
    std::string line;
    for (const char c : text) {
        switch (c) {
            case '\n':
                line += "\\n";
                break;
            case '\t':
                line += "\\t";
                break;
            case '\\':
                line += "\\\\";
                break;
            default:
                line += c;
        }
    }
    return line;
}

std::string plain(const std::string& line) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
        if (line[i] == '\\' && i + 1 < line.size()) {
            const char c = line[++i];
            text += c == 'n' ? '\n' : c == 't' ? '\t' : c;
        } else {
            text += line[i];
        }
    }
    return text;
}

}  // namespace

void Report::write(char kind, const std::string& key, const std::string& value) {
    const std::string line = kind + escaped(key) + '\t' + escaped(value) + '\n';
    std::size_t written = 0;
    while (written < line.size()) {
        const auto count = ::write(file_, line.data() + written, line.size() - written);
        if (count <= 0) {
            std::abort();
        }
        written += static_cast<std::size_t>(count);
    }
}

void Report::note(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    const int number = ++used_[key];
    write(' ', number == 1 ? key : key + " #" + std::to_string(number), value);
}

void Report::skip(const std::string& why) {
    const std::lock_guard lock(mutex_);
    write('s', why, "");
}

void Report::memory(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    write('m', std::to_string(bytes), "");
}

void Report::end() {
    const std::lock_guard lock(mutex_);
    write('e', "", "");
}

bool Report::attempt(const std::string& key, const std::function<void()>& body) {
    std::string said = "nothing thrown";
    try {
        body();
    } catch (...) {
        said = describe_exception();
    }
    note(key, said);
    return said != "nothing thrown";
}

std::string normalised(std::string_view text) {
    text = text.substr(0, text.find('\n'));
    text = text.substr(0, text.find(". "));
    std::string result;
    for (std::size_t i = 0; i < text.size();) {
        if (std::isdigit(static_cast<unsigned char>(text[i])) != 0) {
            // Includes hexadecimal numbers and fractions.
            const bool hex = text[i] == '0' && i + 1 < text.size() && text[i + 1] == 'x';
            i += hex ? 2 : 0;
            const auto part = [&](char c) {
                return hex ? std::isxdigit(static_cast<unsigned char>(c)) != 0
                           : std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '.';
            };
            while (i < text.size() && part(text[i])) {
                ++i;
            }
            result += '#';
        } else {
            result += text[i++];
        }
    }
    return result;
}

std::string describe_exception() {
    std::string kind = "?";
    if (const auto* const type = abi::__cxa_current_exception_type()) {
        int status = 0;
        char* const name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
        kind = name != nullptr ? name : type->name();
        std::free(name);
    }
    // OutOfBlocks is private; programs catch its base.
    if (kind == "vmmgraph::torch::registry::OutOfBlocks") {
        kind = "c10::OutOfMemoryError";
    }
    try {
        throw;
    } catch (const std::exception& error) {
        return kind + ": " + normalised(error.what());
    } catch (...) {
        return kind;
    }
}

Outcome read_notes(const std::string& text) {
    Outcome outcome;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        // Possibly truncated by the end of the process.
        const auto tab = line.find('\t');
        if (line.empty() || tab == std::string::npos) {
            continue;
        }
        const auto key = plain(line.substr(1, tab - 1));
        if (line[0] == 's') {
            outcome.skipped = key;
        } else if (line[0] == 'm') {
            outcome.memory = std::strtoull(key.c_str(), nullptr, 10);
        } else if (line[0] == 'e') {
            outcome.end = "ok";
        } else {
            outcome.notes.push_back({key, plain(line.substr(tab + 1))});
        }
    }
    return outcome;
}

}  // namespace differential
