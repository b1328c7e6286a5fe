#include "files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <new>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "runtime.hpp"

namespace vmmgraph::memory_saver {

namespace {

// Direct I/O needs lengths and addresses in multiples of the medium's block.
constexpr std::uint64_t unit = 4096;

std::uint64_t padded(std::uint64_t bytes) noexcept { return (bytes + unit - 1) / unit * unit; }

class Descriptor {
public:
    explicit Descriptor(int number) noexcept : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (number_ >= 0) {
            static_cast<void>(::close(number_));
        }
    }
    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int number_;
};

// `flags` without O_DIRECT where the file system refuses it, as tmpfs did.
int open_file(const std::string& path, int flags) noexcept {
    constexpr mode_t own = 0600;
    int number = ::open(path.c_str(), flags | O_CLOEXEC | O_DIRECT, own);
    if (number < 0 && errno == EINVAL) {
        if ((flags & O_CREAT) != 0) {
            static_cast<void>(::unlink(path.c_str()));
        }
        number = ::open(path.c_str(), flags | O_CLOEXEC, own);
    }
    return number;
}

int create_file(const std::string& path) noexcept {
    const int number = open_file(path, O_RDWR | O_CREAT | O_EXCL);
    if (number >= 0 || errno != EEXIST) {
        return number;
    }
    // Left by an ended process with this process's number.
    static_cast<void>(::unlink(path.c_str()));
    return open_file(path, O_RDWR | O_CREAT | O_EXCL);
}

// Return 0 or the error number.
int write_all(int number, const std::uint8_t* from, std::size_t bytes, off_t offset) noexcept {
    while (bytes > 0) {
        const ssize_t done = ::pwrite(number, from, bytes, offset);
        if (done < 0 && errno != EINTR) {
            return errno;
        }
        if (done > 0) {
            from += done;
            bytes -= static_cast<std::size_t>(done);
            offset += done;
        }
    }
    return 0;
}

int read_all(int number, std::uint8_t* to, std::size_t bytes, off_t offset) noexcept {
    while (bytes > 0) {
        const ssize_t done = ::pread(number, to, bytes, offset);
        if (done == 0) {
            return ENODATA;
        }
        if (done < 0 && errno != EINTR) {
            return errno;
        }
        if (done > 0) {
            to += done;
            bytes -= static_cast<std::size_t>(done);
            offset += done;
        }
    }
    return 0;
}

// Parallel reads or writes of one buffer: a single thread is slower than tmpfs.
class Parts {
public:
    // `bytes` is padded, and the buffer stays until end() or the destructor, which wait, too.
    template <class Call, class Byte>
    void begin(Call call, int number, Byte* buffer, std::uint64_t bytes, std::uint64_t offset) {
        constexpr std::uint64_t threads = 4, least = std::uint64_t{1} << 20;
        const std::uint64_t each = std::max(least, padded(bytes / threads));
        for (std::uint64_t at = 0; at < bytes; at += each) {
            parts_.push_back(std::async(std::launch::async, call, number, buffer + at,
                                        static_cast<std::size_t>(std::min(each, bytes - at)),
                                        static_cast<off_t>(offset + at)));
        }
    }

    // Returns 0 or the first error number.
    int end() {
        int error = 0;
        for (auto& part : parts_) {
            const int one = part.get();
            error = error == 0 ? one : error;
        }
        parts_.clear();
        return error;
    }

private:
    std::vector<std::future<int>> parts_;
};

// An empty path means the open file.
bool identify(int folder, const char* path, Identity& found) noexcept {
    // Not stat(), whose symbol is younger than the wheel's glibc.
    struct statx now{};
    if (::statx(folder, path, AT_EMPTY_PATH, STATX_INO | STATX_SIZE | STATX_CTIME, &now) != 0) {
        return false;
    }
    found = {now.stx_size, now.stx_ino, now.stx_ctime.tv_sec, now.stx_ctime.tv_nsec};
    return true;
}

int refuse(const char* verb, const std::string& path, int error) noexcept {
    return fail(operating_system, "cannot %s the backup %s: %s; make space or name another folder",
                verb, path.c_str(), std::strerror(error));
}

}  // namespace

std::size_t chunk_bytes() {
    static const std::size_t bytes = [] {
        constexpr std::size_t usual = 64, most = 1 << 20;
        const char* const text = std::getenv("TMS_DISK_BACKUP_CHUNK_MB");
        if (text == nullptr || *text == '\0') {
            return usual << 20;
        }
        char* end = nullptr;
        const unsigned long long asked = std::strtoull(text, &end, 10);
        if (*end != '\0' || *text == '-' || asked == 0 || asked > most) {
            fail_aloud(invalid_value,
                       "cannot use TMS_DISK_BACKUP_CHUNK_MB=%s: it is no number from 1 to 1048576; "
                       "64 is used",
                       text);
            return usual << 20;
        }
        return static_cast<std::size_t>(asked) << 20;
    }();
    return bytes;
}

int BackupFile::check() const {
    Identity now{};
    const char* wrong = nullptr;
    if (!identify(AT_FDCWD, path_.c_str(), now)) {
        wrong = std::strerror(errno);
    } else if (now.bytes != written_.bytes) {
        wrong = "the length differs";
    } else if (now.node != written_.node || now.changed_s != written_.changed_s ||
               now.changed_ns != written_.changed_ns) {
        wrong = "the file was changed or replaced";
    }
    return wrong == nullptr
               ? static_cast<int>(success)
               : fail(file_not_found, "cannot resume from the backup %s: %s; nothing was resumed",
                      path_.c_str(), wrong);
}

void BackupFile::remove() noexcept {
    if (exists()) {
        static_cast<void>(::unlink(path_.c_str()));
        path_.clear();
    }
}

void BackupFile::swap(BackupFile& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(written_, other.written_);
}

Transfer::Transfer(int ordinal) : ordinal_(ordinal), chunk_(chunk_bytes()) {
    void* const both =
        ::mmap(nullptr, 2 * chunk_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (both == MAP_FAILED) {
        throw std::bad_alloc();
    }
    buffers_[0] = static_cast<std::uint8_t*>(both);
    buffers_[1] = buffers_[0] + chunk_;
    const Runtime* const runtime = Runtime::find();
    registered_ = runtime != nullptr && runtime->register_host(both, 2 * chunk_);
}

Transfer::~Transfer() {
    if (registered_) {
        Runtime::find()->unregister_host(buffers_[0]);
    }
    static_cast<void>(::munmap(buffers_[0], 2 * chunk_));
}

int Transfer::copy(void* to, const void* from, std::size_t bytes) const {
    const Runtime* const runtime = Runtime::find();
    if (runtime != nullptr && runtime->memcpy != nullptr) {
        const int code = runtime->copy(ordinal_, to, from, bytes);
        return code == success ? code
                               : fail(code,
                                      "cannot copy a backup on device %d: CUDA failed with "
                                      "cudaError_t %d; look up this code",
                                      ordinal_, code);
    }
    const char* const driver = std::getenv("VMMGRAPH_DRIVER");
    if (driver == nullptr || std::strcmp(driver, "host") != 0) {
        return fail(
            symbol_not_found,
            "cannot copy a backup: the program has no shared CUDA runtime; link the shared one");
    }
    std::memcpy(to, from, bytes);
    return success;
}

int Transfer::save(const void* from, std::uint64_t bytes, const std::string& folder,
                   BackupFile& file) {
    static std::atomic<std::uint64_t> count{0};
    BackupFile made;
    std::string path = folder + "/vmmgraph-" + std::to_string(::getpid()) + "-" +
                       std::to_string(count++) + ".backup";
    const Descriptor to(create_file(path));
    if (to.number() < 0) {
        return refuse("write", path, errno);
    }
    made.path_ = std::move(path);
    Parts writes[2];
    // Finds a full disk before anything is copied, and direct writes need not extend the file. Some
    // file systems have no such call.
    int error = ::fallocate(to.number(), 0, 0, static_cast<off_t>(padded(bytes))) == 0 ? 0 : errno;
    error = error == EOPNOTSUPP || error == ENOSYS || error == EINVAL ? 0 : error;
    int code = success;
    for (std::uint64_t offset = 0, turn = 0; offset < bytes && error == 0 && code == success;
         offset += chunk_, turn ^= 1) {
        error = writes[turn].end();
        const std::size_t part = std::min<std::uint64_t>(chunk_, bytes - offset);
        if (error == 0) {
            code = copy(buffers_[turn], static_cast<const std::uint8_t*>(from) + offset, part);
        }
        if (error == 0 && code == success) {
            writes[turn].begin(write_all, to.number(), buffers_[turn], padded(part), offset);
        }
    }
    for (auto& write : writes) {
        const int last = write.end();
        error = error == 0 ? last : error;
    }
    if (code != success) {
        return code;
    }
    if (error == 0 && (::fsync(to.number()) != 0 || !identify(to.number(), "", made.written_))) {
        error = errno;
    }
    if (error != 0) {
        return refuse("write", made.path_, error);
    }
    // Without direct I/O the pages would stay in the system's cache.
    static_cast<void>(::posix_fadvise(to.number(), 0, 0, POSIX_FADV_DONTNEED));
    file = std::move(made);
    return success;
}

int Transfer::load(void* to, std::uint64_t bytes, const BackupFile& file) {
    const Descriptor from(open_file(file.path_, O_RDONLY));
    if (from.number() < 0) {
        return refuse("read", file.path_, errno);
    }
    Parts reads[2];
    const auto begin = [&](std::uint64_t offset, std::uint64_t turn) {
        const std::uint64_t part =
            offset < bytes ? std::min<std::uint64_t>(chunk_, bytes - offset) : 0;
        reads[turn].begin(read_all, from.number(), buffers_[turn], padded(part), offset);
    };
    begin(0, 0);
    for (std::uint64_t offset = 0, turn = 0; offset < bytes; offset += chunk_, turn ^= 1) {
        begin(offset + chunk_, turn ^ 1);
        if (const int error = reads[turn].end(); error != 0) {
            return refuse("read", file.path_, error);
        }
        const std::size_t part = std::min<std::uint64_t>(chunk_, bytes - offset);
        if (const int code = copy(static_cast<std::uint8_t*>(to) + offset, buffers_[turn], part);
            code != success) {
            return code;
        }
    }
    return success;
}

}  // namespace vmmgraph::memory_saver
