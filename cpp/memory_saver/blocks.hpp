// Table of the library's blocks. Bookkeeping only; makes no calls.
#pragma once

#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files.hpp"

namespace vmmgraph::memory_saver {

// A region for one tag on one device, never destroyed. A tag has several regions if memory was
// requested while all of them were paused.
struct Home {
    vmmgraph_region_t region;
    vmmgraph_device_t device;
    int ordinal;
    const std::string* tag;
    std::uint64_t blocks = 0;
};

// Host copy of a block's bytes; the caller has a pointer to the copy.
struct HostCopy {
    std::unique_ptr<std::uint8_t[]> bytes;
    // Generation of the region's mapping with these contents.
    std::uint64_t generation = 0;
};

struct Block {
    std::uint64_t bytes;
    Home* home;
    bool backup;
    // Host memory of the backup goes back to the system at a resume: the backend "mmap".
    bool returns_host;
    // Contents go to a file, which exists while the block is paused.
    bool disk;
    BackupFile file;
    std::map<std::pair<std::uint64_t, std::uint64_t>, HostCopy> copies;
};

// Tags to pause or resume on one device.
struct Selection {
    int ordinal;
    vmmgraph_device_t device;
    // Without duplicates; the strings live as long as the process.
    std::vector<const char*> tags;
};

// Every function takes the lock of the tables itself unless stated otherwise.
class Blocks {
public:
    using Map = std::map<std::uintptr_t, Block>;

    // Returns the device's handle if the device is open.
    std::optional<vmmgraph_device_t> device(int ordinal);
    // Stores an open device's handle. Returns `device` if another thread stored one first: the
    // caller must close it.
    vmmgraph_device_t add_device(int ordinal, vmmgraph_device_t device);

    std::vector<Home*> homes(int ordinal, const std::string* tag);
    Home* add_home(const Home& home);
    bool is_empty(const Home* home);

    void add(void* at, Block block);
    // Returns the region of the block starting at `at`; null for foreign memory.
    Home* home_at(const void* at);
    bool is_on_disk(const void* at);
    bool returns_host(const Selection& here);
    // Returns the blocks of these tags on the device whose contents go to files, with addresses.
    // The caller prevents their free.
    std::vector<std::pair<void*, Block*>> on_disk(const Selection& here);
    // At the end of the process.
    void remove_files() noexcept;
    // Removes a block from the table; empty if not found.
    Map::node_type take(const void* at);
    void put_back(Map::node_type block) noexcept;

    // Returns the region of the block with all of these bytes; null if none.
    Home* home_around(const std::uint8_t* at, std::uint64_t bytes);
    // Returns that block and its address. The caller holds the lock.
    Map::value_type* find(const std::uint8_t* at, std::uint64_t bytes);

    // Returns the devices with a tag (null: any tag), in the order of their numbers.
    std::vector<Selection> select(const char* tag);
    // Drops the host copies of resumed memory.
    void drop_copies(const Selection& resumed);

private:
    static bool covers(const Selection& here, const Block& block);

    std::map<int, vmmgraph_device_t> devices_;
    std::vector<std::unique_ptr<Home>> homes_;
    Map blocks_;
};

}  // namespace vmmgraph::memory_saver
