// Backups in files: memory streamed through two host buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vmmgraph::memory_saver {

// Bytes of a host buffer: TMS_DISK_BACKUP_CHUNK_MB, by default 64 MiB.
std::size_t chunk_bytes();

// Differs after any change of a file.
struct Identity {
    std::uint64_t bytes;
    std::uint64_t node;
    std::int64_t changed_s;
    std::uint32_t changed_ns;
};

// File with the contents of one paused block. Destroying the object removes the file.
class BackupFile {
public:
    BackupFile() = default;
    BackupFile(BackupFile&& other) noexcept { swap(other); }
    BackupFile& operator=(BackupFile&& other) noexcept {
        swap(other);
        return *this;
    }
    ~BackupFile() { remove(); }

    [[nodiscard]] bool exists() const noexcept { return !path_.empty(); }
    // Fails unless the path names the file that was written, unchanged since.
    [[nodiscard]] int check() const;
    void remove() noexcept;

private:
    friend class Transfer;
    void swap(BackupFile& other) noexcept;

    std::string path_;
    // Of the file as written.
    Identity written_{};
};

// Two host buffers for the blocks of one pause or resume. While one is written to a file or read
// from a file, the other is copied from or to the device.
class Transfer {
public:
    explicit Transfer(int ordinal);
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;
    ~Transfer();

    // Writes a new file in `folder` with direct I/O, where the file system has it. No file is left
    // on failure.
    int save(const void* from, std::uint64_t bytes, const std::string& folder, BackupFile& file);
    int load(void* to, std::uint64_t bytes, const BackupFile& file);

private:
    int copy(void* to, const void* from, std::size_t bytes) const;

    int ordinal_;
    std::size_t chunk_;
    std::uint8_t* buffers_[2] = {};
    bool registered_ = false;
};

}  // namespace vmmgraph::memory_saver
