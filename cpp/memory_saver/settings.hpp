// What threads say of their next allocations, and what the process says of all.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace vmmgraph::memory_saver {

// One thread's. Without a destructor: allocations may come while a thread's own objects are gone already.
struct Settings {
    bool interesting;
    bool backup;
    // Lives as long as the process, and is the same object for the same tag.
    const std::string* tag;
    const char* backend;

    // This thread's, at first as the environment says.
    static Settings& own();
};

// The one object of a tag.
const std::string* tag_named(const char* name);

// "pinned" or "mmap" for one of these, else null.
const char* backend_named(const char* name) noexcept;

// Whether copies of backups stay when memory is resumed.
std::atomic<bool>& retain_backups() noexcept;

// Bytes of a device that stay free.
inline std::atomic<std::uint64_t> margin_bytes{0};

}  // namespace vmmgraph::memory_saver
