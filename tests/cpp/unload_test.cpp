// unload_test <libvmmgraph.so>: loads the library, closes it with live objects and threads inside,
// and loads it again.
#include <dlfcn.h>
#include <vmmgraph/vmmgraph.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

void* library = nullptr;

template <class Function>
Function* function(const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::_Exit(2);
    }
    return reinterpret_cast<Function*>(found);
}
#define CALL(name) function<decltype(name)>(#name)

void expect(vmmgraph_status_t status, vmmgraph_status_t expected, int line) {
    if (status != expected) {
        std::fprintf(stderr, "line %d: status %d\n", line, status);
        std::_Exit(1);
    }
}
#define EXPECT(status, expected) expect(status, expected, __LINE__)

void load(const char* path) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::_Exit(2);
    }
}

}  // namespace

int main(int, char** argv) {
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;
    void* block = nullptr;
    for (int round = 0; round < 3; ++round) {
        load(argv[1]);
        if (round == 0) {
            vmmgraph_device_options_t options{};
            options.struct_size = sizeof options;
            options.driver = VMMGRAPH_DRIVER_HOST;
            EXPECT(CALL(vmmgraph_device_open)(&options, &device), VMMGRAPH_OK);
            EXPECT(CALL(vmmgraph_arena_create)(device, nullptr, &arena), VMMGRAPH_OK);
        } else {
            vmmgraph_space_stats_t stats{};
            stats.struct_size = sizeof stats;
            EXPECT(CALL(vmmgraph_space_stats)(space, &stats), VMMGRAPH_OK);
            if (stats.blocks != 1 || *static_cast<int*>(block) != round) {
                std::fprintf(stderr, "round %d: the block is gone\n", round);
                return 1;
            }
            EXPECT(CALL(vmmgraph_space_destroy)(space), VMMGRAPH_OK);
        }
        EXPECT(CALL(vmmgraph_space_open)(arena, &space), VMMGRAPH_OK);
        EXPECT(CALL(vmmgraph_space_allocate)(space, 1 << 20, nullptr, &block), VMMGRAPH_OK);
        const int next = round + 1;
        std::memcpy(block, &next, sizeof next);

        // A thread holds failure details until it ends, after the library was closed.
        std::atomic<int> turn{0};
        auto* const allocate = CALL(vmmgraph_space_allocate);
        std::thread late([&] {
            void* none = nullptr;
            EXPECT(allocate(space, 0, nullptr, &none), VMMGRAPH_ERROR_INVALID_SIZE);
            turn = 1;
            while (turn != 2) {
                std::this_thread::yield();
            }
        });
        while (turn != 1) {
            std::this_thread::yield();
        }
        if (dlclose(library) != 0) {
            std::fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        turn = 2;
        late.join();
    }
    return 0;
}
