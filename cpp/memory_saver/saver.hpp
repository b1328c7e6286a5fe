// Memory that steps aside, over VmmGraph's regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "blocks.hpp"
#include "settings.hpp"

namespace vmmgraph::memory_saver {

class Saver {
public:
    // Never destroyed: memory may be freed after every static object of the program.
    static Saver& instance();

    // A block with the settings' tag, as cudaMalloc has it. Nothing has changed on failure.
    int allocate(void** at, std::size_t bytes, int ordinal, const Settings& settings);

    // Frees a block of the library's behind everything the device does, paused or not; nullopt: it is none.
    std::optional<int> free(void* at);

    // Null: all tags.
    int pause(const char* tag);
    int resume(const char* tag);

    // A pause and a resume of the tag include the arenas that have it on the device.
    int include_arenas(const std::string* tag, int ordinal);

    // As tms_get_cpu_backup_pointer; the failure is noted.
    std::uint8_t* backup(const std::uint8_t* at, std::uint64_t bytes);

private:
    Saver() = default;

    int open(int ordinal, vmmgraph_device_t* device);
    int make_home(int ordinal, const std::string* tag, Home** home);
    // In one round over the tag's regions; VMMGRAPH_ERROR_WRONG_STATE: other threads paused them meanwhile. `code` is a failure that was noted already.
    vmmgraph_status_t allocate_now(std::size_t bytes, int ordinal, const Settings& settings, Home** home, void** block, int* code);
    int keep(void** at, void* block, std::size_t bytes, Home* home, bool backup);

    Blocks blocks_;
};

}  // namespace vmmgraph::memory_saver
