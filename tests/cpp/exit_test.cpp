// Process exit with live objects. `exit_test <how>` must exit with 0 and an empty stderr.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#include <vmmgraph/region.hpp>

#include "host.hpp"

namespace {

// Destroyed after later statics and Rust's thread-local data.
struct Last {
    ~Last() {
        if (!armed) {
            return;
        }
        // Failures must still be reported.
        try {
            vmmgraph::Options nonsense;
            nonsense.driver = static_cast<vmmgraph::DriverChoice>(99);
            vmmgraph::SharedVmmAllocator arena(0, nonsense);
            std::fputs("an unknown driver was opened\n", stderr);
            std::_Exit(3);
        } catch (const vmmgraph::Error& error) {
            if (error.status() != VMMGRAPH_ERROR_INVALID_ARGUMENT) {
                std::fprintf(stderr, "wrong status %d\n", error.status());
                std::_Exit(4);
            }
        }
    }
    bool armed = false;
} last;

std::vector<vmmgraph::Space> spaces_that_outlive_the_arena;

struct Holder {
    std::unique_ptr<vmmgraph::SharedVmmAllocator> arena;
} holder;

vmmgraph::SharedVmmAllocator& arena() {
    static vmmgraph::SharedVmmAllocator the_arena = host::arena();
    return the_arena;
}

void use(vmmgraph::Space& space) {
    host::fill(space.allocate(host::MiB), host::MiB, 1);
    void* const freed = space.allocate(3 * host::MiB);
    space.free(freed);
    space.seal();
    space.replay(reinterpret_cast<void*>(1), [] {});
    space.replay(reinterpret_cast<void*>(2), [] {});
}

}  // namespace

int main(int argc, char** argv) {
    const std::string how = argc > 1 ? argv[1] : "";
    if (how == "static") {
        arena().switch_to_new_virtual_space();
        static_cast<void>(arena().allocate(host::MiB));
        auto space = arena().open_space();
        use(space);
    } else if (how == "leaked") {
        auto* const space = new vmmgraph::Space(arena().open_space());
        use(*space);
        auto* const open = new vmmgraph::Space(arena().open_space());
        static_cast<void>(open->allocate(host::MiB));
        std::atexit([] { static_cast<void>(arena().stats_json()); });
    } else if (how == "outlive") {
        for (int i = 0; i < 3; ++i) {
            spaces_that_outlive_the_arena.push_back(arena().open_space());
            use(spaces_that_outlive_the_arena.back());
        }
    } else if (how == "logging") {
        vmmgraph::set_log_sink([](vmmgraph::LogLevel, std::string_view) {},
                               vmmgraph::LogLevel::trace);
        holder.arena = std::make_unique<vmmgraph::SharedVmmAllocator>(host::arena());
        auto space = holder.arena->open_space();
        use(space);
        spaces_that_outlive_the_arena.push_back(std::move(space));
    } else if (how == "late") {
        // Stores failure details, which Rust destroys before `last`.
        try {
            static_cast<void>(arena().allocate(0));
            return 2;
        } catch (const vmmgraph::Error&) {
            last.armed = true;
        }
    } else if (how == "paused") {
        static const vmmgraph::Device device = vmmgraph::Device::open(host::device_options(2));
        static vmmgraph::Region region(device, "weights", {vmmgraph::Policy::backup});
        auto* const leaked = new vmmgraph::Region(device, "weights", {vmmgraph::Policy::backup});
        host::fill(region.allocate(host::MiB), host::MiB, 1);
        host::fill(leaked->allocate(host::MiB), host::MiB, 1);
        vmmgraph::pause(device);
    } else if (how == "threads") {
        static thread_local vmmgraph::Space own = arena().open_space();
        use(own);
        for (int i = 0; i < 4; ++i) {
            std::thread([] {
                auto* const mine = new vmmgraph::SharedVmmAllocator(host::arena(1));
                for (;;) {
                    auto space = mine->open_space();
                    use(space);
                }
            }).detach();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    } else {
        std::fprintf(stderr, "no such way: %s\n", how.c_str());
        return 2;
    }
    return 0;
}
