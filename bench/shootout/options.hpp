// Command line: model sizes, shapes, and cells to run.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shootout {

struct Shape {
    bool decode = true;
    std::int64_t tokens = 1;

    [[nodiscard]] std::int64_t rows() const { return decode ? tokens : 1; }
    [[nodiscard]] std::string name() const { return (decode ? "d" : "p") + std::to_string(tokens); }
    bool operator==(const Shape&) const = default;
};

// A configuration measured in its own process.
struct Cell {
    std::string set;
    std::string way;
    std::string order;
    bool operator==(const Cell&) const = default;
};

inline constexpr std::array kSets{"decode", "mixed"};
inline constexpr std::array kWays{"eager",     "private", "shared", "shared_expandable",
                                  "published", "mempool", "blocks"};
inline constexpr std::array kOrders{"ascending", "descending", "random"};
inline const std::array<Shape, 5> kTimed{
    {{true, 1}, {true, 64}, {true, 256}, {true, 512}, {false, 2048}}};

inline std::vector<std::int64_t> default_decode() {
    std::vector<std::int64_t> batches{1, 2, 4};
    for (std::int64_t batch = 8; batch <= 248; batch += 8)
        batches.push_back(batch);
    for (std::int64_t batch = 256; batch <= 512; batch += 16)
        batches.push_back(batch);
    return batches;
}

inline std::vector<std::int64_t> every_decode(std::int64_t step, std::int64_t most) {
    if (step < 1 || most < step)
        throw std::invalid_argument("--decode-every needs a step from 1 to --decode-most");
    std::vector<std::int64_t> batches;
    for (std::int64_t batch = step; batch <= most; batch += step)
        batches.push_back(batch);
    return batches;
}

struct Options {
    std::int64_t hidden = 4096;
    std::int64_t intermediate = 12288;
    std::int64_t heads = 32;
    std::int64_t kv_heads = 8;
    std::int64_t head_dim = 128;
    std::int64_t vocabulary = 151936;
    std::int64_t layers = 12;
    std::int64_t context = 512;
    std::vector<std::int64_t> decode = default_decode();
    std::vector<std::int64_t> prefill{64,   128,  192,  256,  384,  512,  768,
                                      1024, 1536, 2048, 3072, 4096, 6144, 8192};

    int device = 0;
    std::int64_t seed = 1234;
    int replays = 50;
    double tolerance = 0.05;
    bool cold = false;
    bool eager_between = false;
    bool cudnn = true;
    std::uint64_t small_page_mib = 0;
    std::uint64_t large_page_mib = 0;

    std::string cells;
    std::string json;
    double time_limit_s = 300;
    double cell_limit_s = 120;
    bool child = false;
    Cell cell;
};

inline constexpr const char* kHelp =
    R"(shootout: what graph memory costs, one process per cell, one row per cell

  --cells LIST       cells as set:way:order, comma-separated, '*' for any part; 'all'; default: those of the issue's table
                     sets   decode mixed
                     ways   eager private shared shared_expandable published mempool blocks
                     orders ascending descending random
  --json PATH        write the rows as a JSON array (rewritten after every cell)
  --time-limit S     start no cell after S seconds (300);  --cell-limit S: kill a cell after S seconds (120)
  --cold             run the eager references on another stream: the capture stream has no cuBLAS workspace yet
  --eager-between    an eager GEMM on the capture stream between replays
  --replays N        replays per timed shape (50);  --tolerance R: of the largest logit, where replays are not bitwise equal (0.05)
  --no-cudnn         attention without cuDNN
  --decode-every N   decode of the batches N, 2N, 3N, ... up to --decode-most M (256), in place of --decode LIST
  --decode LIST --prefill LIST --hidden N --intermediate N --heads N --kv-heads N --head-dim N --vocabulary N --layers N
  --context N --seed N --device N --small-page-mib N --large-page-mib N
)";

inline std::vector<std::string> split(std::string_view text, char separator) {
    std::vector<std::string> parts;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(separator, begin), text.size());
        parts.emplace_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

inline std::vector<std::int64_t> numbers(std::string_view text) {
    std::vector<std::int64_t> values;
    for (const std::string& part : split(text, ',')) {
        if (!part.empty())
            values.push_back(std::stoll(part));
    }
    return values;
}

inline Options parse(int argc, char** argv) {
    Options options;
    std::int64_t decode_every = 0, decode_most = 256;
    for (int at = 1; at < argc; ++at) {
        const std::string_view name = argv[at];
        const auto value = [&]() -> std::string {
            if (at + 1 >= argc)
                throw std::invalid_argument(std::string(name) + " needs a value");
            return argv[++at];
        };
        const auto number = [&] { return std::stoll(value()); };
        if (name == "--help") {
            std::fputs(kHelp, stdout);
            std::exit(0);
        } else if (name == "--cells")
            options.cells = value();
        else if (name == "--json")
            options.json = value();
        else if (name == "--time-limit")
            options.time_limit_s = std::stod(value());
        else if (name == "--cell-limit")
            options.cell_limit_s = std::stod(value());
        else if (name == "--cold")
            options.cold = true;
        else if (name == "--eager-between")
            options.eager_between = true;
        else if (name == "--no-cudnn")
            options.cudnn = false;
        else if (name == "--replays")
            options.replays = std::max(1, static_cast<int>(number()));
        else if (name == "--tolerance")
            options.tolerance = std::stod(value());
        else if (name == "--decode")
            options.decode = numbers(value());
        else if (name == "--decode-every")
            decode_every = number();
        else if (name == "--decode-most")
            decode_most = number();
        else if (name == "--prefill")
            options.prefill = numbers(value());
        else if (name == "--hidden")
            options.hidden = number();
        else if (name == "--intermediate")
            options.intermediate = number();
        else if (name == "--heads")
            options.heads = number();
        else if (name == "--kv-heads")
            options.kv_heads = number();
        else if (name == "--head-dim")
            options.head_dim = number();
        else if (name == "--vocabulary")
            options.vocabulary = number();
        else if (name == "--layers")
            options.layers = number();
        else if (name == "--context")
            options.context = number();
        else if (name == "--seed")
            options.seed = number();
        else if (name == "--device")
            options.device = static_cast<int>(number());
        else if (name == "--small-page-mib")
            options.small_page_mib = static_cast<std::uint64_t>(number());
        else if (name == "--large-page-mib")
            options.large_page_mib = static_cast<std::uint64_t>(number());
        else if (name == "--cell") {
            options.child = true;
            options.cell.set = value();
            options.cell.way = value();
            options.cell.order = value();
        } else
            throw std::invalid_argument("unknown option " + std::string(name) + "; see --help");
    }
    if (decode_every != 0)
        options.decode = every_decode(decode_every, decode_most);
    return options;
}

// Returns a set's shapes in capture order. The random order is the same on every run.
inline std::vector<Shape> shapes_of(const Options& options, const Cell& cell) {
    std::vector<Shape> shapes;
    for (const std::int64_t tokens : options.decode)
        shapes.push_back({true, tokens});
    if (cell.set == "mixed") {
        for (const std::int64_t tokens : options.prefill)
            shapes.push_back({false, tokens});
    }
    if (cell.order == "descending") {
        std::reverse(shapes.begin(), shapes.end());
    } else if (cell.order == "random") {
        std::mt19937_64 engine(20240917);
        for (std::size_t left = shapes.size(); left > 1; --left)
            std::swap(shapes[left - 1], shapes[engine() % left]);
    }
    return shapes;
}

inline std::vector<Cell> cells_of(const Options& options) {
    // eager and private pools do not depend on the order.
    static const char* const kDefault =
        "decode:private:descending,decode:shared:ascending,decode:shared:descending,decode:shared_"
        "expandable:descending,"
        "decode:published:descending,decode:mempool:descending,decode:blocks:*,"
        "mixed:eager:ascending,mixed:private:descending,mixed:shared:*,mixed:shared_expandable:"
        "ascending,"
        "mixed:shared_expandable:descending,mixed:published:ascending,mixed:published:descending,"
        "mixed:mempool:*,mixed:blocks:*";
    const std::string wanted = options.cells.empty()    ? kDefault
                               : options.cells == "all" ? "*:*:*"
                                                        : options.cells;
    const auto matches = [](const std::string& pattern, const char* name) {
        return pattern == "*" || pattern == name;
    };
    std::vector<Cell> cells;
    for (const std::string& item : split(wanted, ',')) {
        const std::vector<std::string> parts = split(item, ':');
        if (parts.size() != 3)
            throw std::invalid_argument("a cell is set:way:order, not '" + item + "'");
        const std::size_t before = cells.size();
        bool known = false;
        for (const char* set : kSets) {
            for (const char* way : kWays) {
                for (const char* order : kOrders) {
                    if (!matches(parts[0], set) || !matches(parts[1], way) ||
                        !matches(parts[2], order))
                        continue;
                    known = true;
                    const Cell cell{set, way, order};
                    if (std::find(cells.begin(), cells.end(), cell) == cells.end())
                        cells.push_back(cell);
                }
            }
        }
        if (!known && cells.size() == before)
            throw std::invalid_argument("no cell matches '" + item + "'");
    }
    return cells;
}

}  // namespace shootout
