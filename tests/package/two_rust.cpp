// An engine with its own Rust static library. Both Rust runtimes work.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vmmgraph/vmmgraph.hpp>

extern "C" std::uint64_t other_rust_sum(std::uint64_t up_to);

int main() {
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::host;
    vmmgraph::SharedVmmAllocator arena(0, options);
    std::uint64_t sum = 0;
    std::thread other([&] { sum = other_rust_sum(1000); });
    int wrong = 0;
    for (int i = 0; i < 50; ++i) {
        auto space = arena.open_space();
        std::memset(space.allocate(1 << 20), i, 1 << 20);
        space.seal();
        try {
            static_cast<void>(space.allocate(1));
            ++wrong;
        } catch (const vmmgraph::Error&) {
        }
    }
    other.join();
    std::printf("sum %llu, wrong %d\n", static_cast<unsigned long long>(sum), wrong);
    return sum == 500500 && other_rust_sum(3) == 6 && wrong == 0 ? 0 : 1;
}
