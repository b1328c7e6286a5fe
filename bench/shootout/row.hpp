// One result row: names and JSON values, in order of insertion.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shootout {

class Row {
public:
    void set(std::string_view key, std::string_view text) { put(key, quoted(text)); }
    void set(std::string_view key, const char* text) { put(key, quoted(text)); }
    void set(std::string_view key, bool value) { put(key, value ? "true" : "false"); }
    void set(std::string_view key, std::int64_t value) { put(key, std::to_string(value)); }
    void set(std::string_view key, double value, int decimals = 3) {
        if (!std::isfinite(value))
            return none(key);
        char text[64];
        std::snprintf(text, sizeof text, "%.*f", decimals, value);
        put(key, text);
    }
    void none(std::string_view key) { put(key, "null"); }
    // `json` is a JSON value.
    void put(std::string_view key, std::string_view json) {
        for (auto& [name, value] : fields_) {
            if (name == key) {
                value = json;
                return;
            }
        }
        fields_.emplace_back(key, json);
    }

    // Returns the value for a table: a string without quotes, "-" if missing.
    [[nodiscard]] std::string shown(std::string_view key) const {
        for (const auto& [name, value] : fields_) {
            if (name != key)
                continue;
            if (value == "null")
                return "-";
            return value.size() >= 2 && value.front() == '"' ? value.substr(1, value.size() - 2)
                                                             : value;
        }
        return "-";
    }

    [[nodiscard]] std::string json() const {
        std::string text = "{";
        for (const auto& [name, value] : fields_)
            text += (text.size() > 1 ? ", " : "") + quoted(name) + ": " + value;
        return text + "}";
    }

    // One line per field, for the pipe from a cell's process to its parent.
    [[nodiscard]] std::string lines() const {
        std::string text;
        for (const auto& [name, value] : fields_)
            text += name + '\t' + value + '\n';
        return text;
    }
    void read_lines(std::string_view text) {
        while (!text.empty()) {
            const std::size_t end = text.find('\n');
            if (end == std::string_view::npos)
                return;
            const std::string_view line = text.substr(0, end);
            if (const std::size_t tab = line.find('\t'); tab != std::string_view::npos) {
                put(line.substr(0, tab), line.substr(tab + 1));
            }
            text.remove_prefix(end + 1);
        }
    }

private:
    static std::string quoted(std::string_view text) {
        std::string out = "\"";
        for (const char c : text) {
            if (c == '"' || c == '\\') {
                out += '\\';
                out += c;
            } else if (static_cast<unsigned char>(c) < 0x20) {
                out += ' ';
            } else {
                out += c;
            }
        }
        return out + '"';
    }

    std::vector<std::pair<std::string, std::string>> fields_;
};

}  // namespace shootout
