// Which memory is the library's: bookkeeping, which calls nothing.
#pragma once

#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace vmmgraph::memory_saver {

// A region for one tag on one device. A tag has several where memory was asked for while all it had were paused. They stay until the
// process ends.
struct Home {
    vmmgraph_region_t region;
    vmmgraph_device_t device;
    int ordinal;
    const std::string* tag;
    // Live ones.
    std::uint64_t blocks = 0;
};

// Host bytes that a caller has a pointer to.
struct HostCopy {
    std::unique_ptr<std::uint8_t[]> bytes;
    // The region's mapping whose contents they are.
    std::uint64_t generation = 0;
};

struct Block {
    std::uint64_t bytes;
    Home* home;
    bool backup;
    // By offset and length.
    std::map<std::pair<std::uint64_t, std::uint64_t>, HostCopy> copies;
};

// What is to be paused or resumed on one device.
struct Selection {
    int ordinal;
    vmmgraph_device_t device;
    // Each once; they live as long as the process.
    std::vector<const char*> tags;
};

// Every function takes the lock of the tables itself, unless it says otherwise.
class Blocks {
public:
    using Map = std::map<std::uintptr_t, Block>;

    // The device's handle, if it is open.
    std::optional<vmmgraph_device_t> device(int ordinal);
    // Keeps an open device; the handle that is not needed, if somebody else was first.
    vmmgraph_device_t add_device(int ordinal, vmmgraph_device_t device);

    std::vector<Home*> homes(int ordinal, const std::string* tag);
    Home* add_home(const Home& home);
    bool is_empty(const Home* home);

    void add(void* at, Block block);
    // The block that begins there; null: somebody else's memory.
    Home* home_at(const void* at);
    // Takes the block out of the books; empty if there is none any more.
    Map::node_type take(const void* at);
    void put_back(Map::node_type block) noexcept;

    // Where the block is that all of these bytes are in; null: there is none.
    Home* home_around(const std::uint8_t* at, std::uint64_t bytes);
    // That block, with its address. The caller holds the lock.
    Map::value_type* find(const std::uint8_t* at, std::uint64_t bytes);

    // The devices with a tag; null: with any. In the order of their numbers.
    std::vector<Selection> select(const char* tag);
    // Copies of what has come back are nobody's.
    void drop_copies(const Selection& resumed);

private:
    std::map<int, vmmgraph_device_t> devices_;
    std::vector<std::unique_ptr<Home>> homes_;
    Map blocks_;
};

}  // namespace vmmgraph::memory_saver
