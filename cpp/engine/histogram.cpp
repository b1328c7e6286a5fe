#include "histogram.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>

#include <unistd.h>

#include "declare.hpp"

namespace vmmgraph::engine {
namespace {

using dispatch::Mode;

// Reader of the JSON values which a histogram has: objects, arrays, plain strings, natural numbers.
class Reader {
public:
    Reader(const std::string& path, const std::string& text) : path_(path), text_(text) {}

    // Calls `value(name)` for each member.
    template <class F>
    void object(F&& value) {
        sequence('{', '}', [&] {
            const auto name = string();
            expect(':');
            value(name);
        });
    }
    template <class F>
    void array(F&& value) {
        sequence('[', ']', value);
    }
    std::string string() {
        expect('"');
        const auto end = text_.find_first_of("\"\\", at_);
        if (end == std::string::npos || text_[end] == '\\') {
            reject("a string without escapes");
        }
        const auto text = text_.substr(at_, end - at_);
        at_ = end + 1;
        return text;
    }
    std::uint64_t number(std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
        peek();
        std::uint64_t value = 0;
        const auto begin = at_;
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
            if (value > (most - digit) / 10) {
                reject(std::string("a number of at most ").append(std::to_string(most)));
            }
            value = 10 * value + digit;
        }
        if (at_ == begin) {
            reject("a number");
        }
        return value;
    }
    void end() {
        if (peek() != '\0') {
            reject("the end of the file");
        }
    }
    [[noreturn]] void reject(const std::string& expected) const {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot read the histogram " + path_ + ": byte " + std::to_string(at_) +
                   " must begin " + expected + "; delete the file to start without it");
    }

private:
    // Skips white space, and returns the next character; 0 at the end.
    char peek() {
        at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    void expect(char character) {
        if (peek() != character) {
            reject(std::string("a ") + character);
        }
        ++at_;
    }
    template <class F>
    void sequence(char open, char close, F&& item) {
        expect(open);
        if (peek() == close) {
            ++at_;
            return;
        }
        for (;;) {
            item();
            if (peek() == close) {
                ++at_;
                return;
            }
            expect(',');
        }
    }

    const std::string& path_;
    const std::string& text_;
    std::size_t at_ = 0;
};

ShapeSteps read_shape(Reader& reader) {
    constexpr auto most = std::numeric_limits<std::uint32_t>::max();
    ShapeSteps shape;
    reader.object([&](const std::string& name) {
        if (name == "mode") {
            const auto mode = reader.string();
            if (mode != "full" && mode != "piecewise") {
                reader.reject("the mode \"full\" or \"piecewise\"");
            }
            shape.mode = mode == "full" ? Mode::full : Mode::piecewise;
        } else if (name == "variant") {
            shape.key.variant = static_cast<std::uint32_t>(reader.number(most));
        } else if (name == "extents") {
            std::size_t axis = 0;
            reader.array([&] {
                if (axis == shape.key.extents.size()) {
                    reader.reject("the end of four extents");
                }
                shape.key.extents[axis++] = static_cast<std::uint32_t>(reader.number(most));
            });
        } else if (name == "steps") {
            shape.steps = reader.number();
        } else {
            reader.reject("a known member, not \"" + name + "\"");
        }
    });
    return shape;
}

[[noreturn]] void refuse_write(const std::string& path) {
    const std::string why = std::strerror(errno);
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
           "cannot write the histogram " + path + ": " + why +
               "; name a file in a folder which this process may write");
}

}  // namespace

std::vector<ShapeSteps> read_histogram(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file && errno == ENOENT) {
        return {};
    }
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    Reader reader(path, text);
    std::vector<ShapeSteps> shapes;
    bool known = false;
    reader.object([&](const std::string& name) {
        if (name == "vmmgraph_histogram") {
            known = reader.number() == 1;
        } else if (name == "shapes" && known) {
            reader.array([&] { shapes.push_back(read_shape(reader)); });
        } else {
            reader.reject("a histogram of version 1");
        }
    });
    reader.end();
    return shapes;
}

void write_histogram(const std::string& path, const std::vector<ShapeSteps>& shapes) {
    std::ostringstream text;
    text << "{\"vmmgraph_histogram\": 1, \"shapes\": [";
    const char* between = "\n";
    for (const auto& shape : shapes) {
        const auto& sizes = shape.key.extents;
        text << between << "{\"mode\": \"" << (shape.mode == Mode::full ? "full" : "piecewise")
             << "\", \"variant\": " << shape.key.variant << ", \"extents\": [" << sizes[0] << ", "
             << sizes[1] << ", " << sizes[2] << ", " << sizes[3] << "], \"steps\": " << shape.steps
             << "}";
        between = ",\n";
    }
    text << "]}\n";
    // Beside the file, so that the rename replaces the file at once.
    const auto beside = path + "." + std::to_string(::getpid()) + ".new";
    {
        std::ofstream file(beside, std::ios::binary | std::ios::trunc);
        file << text.str();
        file.flush();
        if (!file) {
            refuse_write(beside);
        }
    }
    if (std::rename(beside.c_str(), path.c_str()) != 0) {
        const auto why = errno;
        static_cast<void>(std::remove(beside.c_str()));
        errno = why;
        refuse_write(path);
    }
}

}  // namespace vmmgraph::engine
