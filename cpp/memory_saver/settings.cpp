#include "settings.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <set>

#include "errors.hpp"
#include "forks.hpp"

namespace vmmgraph::memory_saver {

namespace {

thread_local Settings settings{};

bool is_one_of(const char* text, std::initializer_list<const char*> words) noexcept {
    for (const char* word : words) {
        if (std::strcmp(text, word) == 0) {
            return true;
        }
    }
    return false;
}

bool flag(const char* name) noexcept {
    const char* const text = std::getenv(name);
    if (text == nullptr || is_one_of(text, {"", "0", "false", "FALSE", "False", "no", "NO"})) {
        return false;
    }
    if (!is_one_of(text, {"1", "true", "TRUE", "True", "yes", "YES"})) {
        fail_aloud(invalid_value,
                   "cannot read %s=%s: the value is neither true nor false and counts as false; "
                   "set true or false",
                   name, text);
        return false;
    }
    return true;
}

const char* initial_backend() noexcept {
    const char* const text = std::getenv("TMS_INIT_CPU_BACKUP_BACKEND");
    if (text == nullptr || *text == '\0') {
        return "pinned";
    }
    const char* const known = backend_named(text);
    if (known == nullptr) {
        fail_aloud(invalid_value,
                   "cannot read TMS_INIT_CPU_BACKUP_BACKEND=%s: the value is neither pinned nor "
                   "mmap; set one of these",
                   text);
        return "pinned";
    }
    return known;
}

}  // namespace

Settings& Settings::own() {
    if (settings.tag == nullptr) {
        // Warnings about the environment are printed once, not per thread.
        static const Settings initial = [] {
            const bool host = flag("TMS_INIT_ENABLE_CPU_BACKUP"),
                       disk = flag("TMS_INIT_ENABLE_DISK_BACKUP");
            if (host && disk) {
                fail_aloud(invalid_value,
                           "cannot back up to disk: TMS_INIT_ENABLE_CPU_BACKUP is set too, so "
                           "backups are in host memory; unset it");
            }
            return Settings{flag("TMS_INIT_ENABLE"), host, disk && !host, tag_named("default"),
                            initial_backend()};
        }();
        settings = initial;
    }
    return settings;
}

const std::string* tag_named(const char* name) {
    // Never destroyed: pointers to tags may outlive all static objects.
    static auto& tags = *new std::set<std::string>;
    const std::lock_guard lock(tables());
    return &*tags.emplace(name).first;
}

const char* backend_named(const char* name) noexcept {
    for (const char* known : {"pinned", "mmap"}) {
        if (name != nullptr && std::strcmp(name, known) == 0) {
            return known;
        }
    }
    return nullptr;
}

namespace {

// Never destroyed: the exit may still pause. The tables' lock guards it.
std::string& folder_of_files() {
    static auto& folder = *new std::string([] {
        for (const char* const name : {"TMS_DISK_BACKUP_DIR", "TMPDIR"}) {
            const char* const text = std::getenv(name);
            if (text != nullptr && *text != '\0') {
                return std::string(text);
            }
        }
        return std::string("/tmp");
    }());
    return folder;
}

}  // namespace

std::string disk_folder() {
    const std::lock_guard lock(tables());
    return folder_of_files();
}

void set_disk_folder(const char* folder) {
    const std::lock_guard lock(tables());
    folder_of_files() = folder;
}

std::atomic<bool>& retain_backups() noexcept {
    static std::atomic<bool> retain{flag("TMS_RETAIN_CPU_BACKUP")};
    return retain;
}

}  // namespace vmmgraph::memory_saver
