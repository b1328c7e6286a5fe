// Settings of a thread for its next allocations, and process-wide settings.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace vmmgraph::memory_saver {

// Without destructors: a thread may allocate after its thread-locals are destroyed.
struct Settings {
    bool interesting;
    bool backup;
    // Contents go to a file; then `backup` has no effect.
    bool disk;
    // Lives as long as the process; equal tags share one object.
    const std::string* tag;
    const char* backend;

    // Returns this thread's settings, initialised from the environment.
    static Settings& own();
};

const std::string* tag_named(const char* name);

// Returns the static string "pinned" or "mmap"; null for any other name.
const char* backend_named(const char* name) noexcept;

// Folder of files with backups: TMS_DISK_BACKUP_DIR, else TMPDIR, else /tmp.
std::string disk_folder();
void set_disk_folder(const char* folder);

// Whether host copies of backups survive a resume.
std::atomic<bool>& retain_backups() noexcept;

inline std::atomic<std::uint64_t> margin_bytes{0};

}  // namespace vmmgraph::memory_saver
