// Pausable memory on VmmGraph regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "blocks.hpp"
#include "settings.hpp"

namespace vmmgraph::memory_saver {

class Saver {
public:
    // Never destroyed: memory may be freed after all static objects of the program are destroyed.
    static Saver& instance();

    // Allocates a block with the settings' tag, like cudaMalloc. No effect on failure.
    int allocate(void** at, std::size_t bytes, int ordinal, const Settings& settings);

    // Frees a block after all work of the device, paused or not; nullopt for foreign memory.
    std::optional<int> free(void* at);

    // Null: all tags.
    int pause(const char* tag);
    int resume(const char* tag);

    int include_arenas(const std::string* tag, int ordinal);

    std::uint8_t* backup(const std::uint8_t* at, std::uint64_t bytes);

private:
    Saver() = default;

    int open(int ordinal, vmmgraph_device_t* device);
    int make_home(int ordinal, const std::string* tag, Home** home);
    // Tries all regions of the tag once. VMMGRAPH_ERROR_WRONG_STATE: other threads paused them.
    // `code`: an already stored failure.
    vmmgraph_status_t allocate_now(std::size_t bytes, int ordinal, const Settings& settings,
                                   Home** home, void** block, int* code);
    int keep(void** at, void* block, std::size_t bytes, Home* home, const Settings& settings);

    int pause_here(const Selection& here);
    int resume_here(const Selection& here);
    // Empty without blocks whose contents go to files.
    std::unique_lock<std::recursive_mutex> lock_files(const Selection& here);
    int save_files(const Selection& here, std::vector<Block*>& saved);
    int load_files(const Selection& here);

    Blocks blocks_;
    // Held while contents move between memory and files, and while blocks with files come and go.
    // Recursive, because hooks of a pause may free.
    std::recursive_mutex disk_;
};

}  // namespace vmmgraph::memory_saver
