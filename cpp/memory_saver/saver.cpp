#include "saver.hpp"

#include <cstdlib>
#include <mutex>
#include <new>

#include "core.hpp"
#include "errors.hpp"
#include "files.hpp"
#include "forks.hpp"
#include "runtime.hpp"

namespace vmmgraph::memory_saver {

namespace {

int refuse_in_child() noexcept {
    return fail(
        not_initialized,
        "cannot use CUDA: this process was forked from one with regions; start workers by spawn");
}

// Waits for a device. Does nothing for a static runtime, which cannot be looked up: the program
// must wait itself.
int wait_for(int ordinal) {
    const Runtime* const runtime = Runtime::find();
    const int code = runtime == nullptr ? static_cast<int>(success) : runtime->wait_for(ordinal);
    if (code == capturing) {
        return fail(code,
                    "cannot wait for device %d: a stream is under capture; repeat the call after "
                    "the capture",
                    ordinal);
    }
    return code == success ? code
                           : fail(code,
                                  "cannot wait for device %d: CUDA failed with cudaError_t %d; "
                                  "look up this code",
                                  ordinal, code);
}

bool within_margin(int ordinal, std::size_t bytes, int* code) noexcept {
    const std::uint64_t margin = margin_bytes.load(std::memory_order_relaxed);
    const Runtime* const runtime = margin == 0 ? nullptr : Runtime::find();
    if (runtime == nullptr) {
        return true;
    }
    std::size_t free = 0;
    *code = runtime->free_bytes(ordinal, &free);
    if (*code != success) {
        fail(*code,
             "cannot read the free memory of device %d: CUDA failed with cudaError_t %d; look up "
             "this code",
             ordinal, *code);
        return false;
    }
    if (bytes <= free && margin <= free - bytes) {
        return true;
    }
    *code = fail(out_of_memory,
                 "cannot allocate %zu bytes: the margin is %llu bytes and %zu are free; lower the "
                 "margin or free memory",
                 bytes, static_cast<unsigned long long>(margin), free);
    return false;
}

vmmgraph_region_stats_t stats_of(vmmgraph_region_t region) noexcept {
    vmmgraph_region_stats_t stats{};
    stats.struct_size = sizeof stats;
    static_cast<void>(Core::found().region_stats(region, &stats));
    return stats;
}

}  // namespace

Saver& Saver::instance() {
    static Saver& saver = *new Saver;
    return saver;
}

int Saver::open(int ordinal, vmmgraph_device_t* device) {
    if (const auto known = blocks_.device(ordinal); known.has_value()) {
        *device = *known;
        return success;
    }
    if (Core::find() == nullptr) {
        return fail(symbol_not_found,
                    "cannot load VmmGraph: %s is neither loaded nor beside the memory saver; "
                    "install both in one folder",
                    VMMGRAPH_CORE_FILE);
    }
    vmmgraph_device_options_t options{};
    options.struct_size = sizeof options;
    // Host memory is a valid result of cudaMalloc only if VMMGRAPH_DRIVER requests the host driver.
    options.driver =
        std::getenv("VMMGRAPH_DRIVER") == nullptr ? VMMGRAPH_DRIVER_CUDA : VMMGRAPH_DRIVER_AUTO;
    options.device = ordinal;
    if (const int code = fail_with(Core::found().device_open(&options, device)); code != success) {
        return code;
    }
    if (const vmmgraph_device_t spare = blocks_.add_device(ordinal, *device); spare != nullptr) {
        *device = *blocks_.device(ordinal);
        static_cast<void>(Core::found().device_close(spare));
    }
    return success;
}

int Saver::make_home(int ordinal, const std::string* tag, Home** home) {
    Home made{nullptr, nullptr, ordinal, tag};
    if (const int code = open(ordinal, &made.device); code != success) {
        return code;
    }
    if (const int code = fail_with(
            Core::found().region_create(made.device, tag->c_str(), nullptr, &made.region));
        code != success) {
        return code;
    }
    try {
        *home = blocks_.add_home(made);
    } catch (...) {
        static_cast<void>(Core::found().region_destroy(made.region));
        throw;
    }
    return success;
}

int Saver::keep(void** at, void* block, std::size_t bytes, Home* home, const Settings& settings) {
    try {
        const bool host = settings.backup && !settings.disk;
        const bool returns = host && settings.backend == backend_named("mmap");
        blocks_.add(block, Block{bytes, home, host, returns, settings.disk, {}, {}});
    } catch (...) {
        static_cast<void>(Core::found().region_free(home->region, block));
        throw;
    }
    *at = block;
    return success;
}

int Saver::allocate(void** at, std::size_t bytes, int ordinal, const Settings& settings) {
    if (in_child()) {
        return refuse_in_child();
    }
    note_use();
    if (int code = success; !within_margin(ordinal, bytes, &code)) {
        return code;
    }
    const std::unique_lock disk =
        settings.disk ? std::unique_lock(disk_) : std::unique_lock<std::recursive_mutex>();
    // Another thread may pause a region found or made here; each further round repeats the race.
    constexpr int most_rounds = 1000;
    for (int round = 1;; ++round) {
        Home* home = nullptr;
        void* block = nullptr;
        int code = success;
        const vmmgraph_status_t status =
            allocate_now(bytes, ordinal, settings, &home, &block, &code);
        if (code != success) {
            return code;
        }
        if (status == VMMGRAPH_OK) {
            return keep(at, block, bytes, home, settings);
        }
        if (status != VMMGRAPH_ERROR_WRONG_STATE || round == most_rounds) {
            return fail_with(status);
        }
    }
}

vmmgraph_status_t Saver::allocate_now(std::size_t bytes, int ordinal, const Settings& settings,
                                      Home** home, void** block, int* code) {
    const std::int32_t policy =
        settings.backup && !settings.disk ? VMMGRAPH_POLICY_BACKUP : VMMGRAPH_POLICY_DISCARD;
    // The default stream stands for all streams: a free and a pause wait for the device.
    const auto try_in = [&](Home* in) {
        *home = in;
        return Core::found().region_allocate(in->region, bytes, policy, nullptr, block);
    };
    const auto homes = blocks_.homes(ordinal, settings.tag);
    for (Home* const one : homes) {
        if (const vmmgraph_status_t status = try_in(one); status != VMMGRAPH_ERROR_WRONG_STATE) {
            return status;
        }
    }
    // All regions are paused, but the new memory must be mapped now. Reuse an empty region, or each
    // cycle would add one.
    for (Home* const one : homes) {
        if (blocks_.is_empty(one) &&
            Core::found().region_resume(one->region, 0, nullptr) == VMMGRAPH_OK &&
            try_in(one) == VMMGRAPH_OK) {
            return VMMGRAPH_OK;
        }
    }
    Home* made = nullptr;
    *code = make_home(ordinal, settings.tag, &made);
    return *code == success ? try_in(made) : VMMGRAPH_ERROR_WRONG_STATE;
}

std::optional<int> Saver::free(void* at) {
    const Home* const home = in_child() ? nullptr : blocks_.home_at(at);
    if (home == nullptr) {
        return std::nullopt;
    }
    const std::unique_lock disk =
        blocks_.is_on_disk(at) ? std::unique_lock(disk_) : std::unique_lock<std::recursive_mutex>();
    if (const int code = wait_for(home->ordinal); code != success) {
        return code;
    }
    // Remove the block first: a new block may get the freed address at once.
    auto block = blocks_.take(at);
    if (!block) {
        return std::nullopt;
    }
    if (const int code = fail_with(Core::found().region_free(home->region, at)); code != success) {
        blocks_.put_back(std::move(block));
        return code;
    }
    // Makes the memory available outside the library: the query reaps completed frees, the trim
    // returns pages to the driver.
    static_cast<void>(wait_for(home->ordinal));
    static_cast<void>(stats_of(home->region));
    static_cast<void>(Core::found().device_trim(home->device, nullptr));
    return success;
}

int Saver::pause(const char* tag) {
    if (in_child()) {
        return refuse_in_child();
    }
    int first = success;
    for (const Selection& here : blocks_.select(tag)) {
        const int code = pause_here(here);
        first = first == success ? code : first;
    }
    return first;
}

int Saver::pause_here(const Selection& here) {
    if (const int code = wait_for(here.ordinal); code != success) {
        return code;
    }
    const auto disk = lock_files(here);
    std::vector<Block*> saved;
    int code = disk ? save_files(here, saved) : static_cast<int>(success);
    if (code == success) {
        code = fail_with(Core::found().device_pause(here.device, here.tags.data(), here.tags.size(),
                                                    nullptr, nullptr));
    }
    for (Block* const block : code == success ? std::vector<Block*>() : saved) {
        if (stats_of(block->home->region).paused == 0) {
            block->file.remove();
        }
    }
    return code;
}

std::unique_lock<std::recursive_mutex> Saver::lock_files(const Selection& here) {
    return blocks_.on_disk(here).empty() ? std::unique_lock<std::recursive_mutex>()
                                         : std::unique_lock(disk_);
}

int Saver::save_files(const Selection& here, std::vector<Block*>& saved) {
    // A child has no files of its own.
    static const int at_exit = std::atexit([] {
        if (!in_child()) {
            instance().blocks_.remove_files();
        }
    });
    static_cast<void>(at_exit);
    Transfer transfer(here.ordinal);
    const std::string folder = disk_folder();
    for (auto& [at, block] : blocks_.on_disk(here)) {
        // A file that exists has the contents: the block is paused, or its resume failed.
        if (block->file.exists() || stats_of(block->home->region).paused != 0) {
            continue;
        }
        if (const int code = transfer.save(at, block->bytes, folder, block->file);
            code != success) {
            return code;
        }
        saved.push_back(block);
    }
    return success;
}

int Saver::resume(const char* tag) {
    if (in_child()) {
        return refuse_in_child();
    }
    int first = success;
    for (const Selection& here : blocks_.select(tag)) {
        const int code = resume_here(here);
        if (code == success && !retain_backups().load(std::memory_order_relaxed)) {
            blocks_.drop_copies(here);
            if (blocks_.returns_host(here)) {
                static_cast<void>(Core::found().device_trim_host(here.device, nullptr));
            }
        }
        first = first == success ? code : first;
    }
    return first;
}

int Saver::resume_here(const Selection& here) {
    const auto disk = lock_files(here);
    for (auto& [at, block] : blocks_.on_disk(here)) {
        if (block->file.exists()) {
            if (const int code = block->file.check(); code != success) {
                return code;
            }
        }
    }
    int code = fail_with(
        Core::found().device_resume(here.device, here.tags.data(), here.tags.size(), 0, nullptr));
    if (code != success || !disk) {
        return code;
    }
    code = guarded([&] { return load_files(here); });
    if (code != success) {
        const char* text = nullptr;
        static_cast<void>(take_last(&text));
        const std::string why = text;
        // As before the call. The files stay for a further attempt.
        std::vector<Block*> saved;
        if (save_files(here, saved) == success) {
            static_cast<void>(Core::found().device_pause(here.device, here.tags.data(),
                                                         here.tags.size(), nullptr, nullptr));
        }
        return fail(code, "%s", why.c_str());
    }
    return code;
}

int Saver::load_files(const Selection& here) {
    Transfer transfer(here.ordinal);
    for (auto& [at, block] : blocks_.on_disk(here)) {
        if (block->file.exists()) {
            if (const int code = transfer.load(at, block->bytes, block->file); code != success) {
                return code;
            }
        }
    }
    for (auto& [at, block] : blocks_.on_disk(here)) {
        block->file.remove();
    }
    return success;
}

int Saver::include_arenas(const std::string* tag, int ordinal) {
    if (in_child()) {
        return refuse_in_child();
    }
    note_use();
    // Pauses select regions by tag: an empty region represents the tag.
    Home* made = nullptr;
    return blocks_.homes(ordinal, tag).empty() ? make_home(ordinal, tag, &made)
                                               : static_cast<int>(success);
}

std::uint8_t* Saver::backup(const std::uint8_t* at, std::uint64_t bytes) {
    if (in_child()) {
        static_cast<void>(refuse_in_child());
        return nullptr;
    }
    const auto none = [&](const char* why) -> std::uint8_t* {
        fail(invalid_value, "cannot return a backup of %llu bytes at %p: %s",
             static_cast<unsigned long long>(bytes), static_cast<const void*>(at), why);
        return nullptr;
    };
    constexpr const char* foreign =
        "they are in no block of a region; pass a range inside one block";
    const Home* const home = blocks_.home_around(at, bytes);
    if (home == nullptr) {
        return none(foreign);
    }
    const auto stats = stats_of(home->region);
    // Held during the copy: a concurrent free would remove the block.
    const std::lock_guard lock(tables());
    auto* const found = blocks_.find(at, bytes);
    if (found == nullptr || found->second.home != home) {
        return none(foreign);
    }
    auto& [start, block] = *found;
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(at) - start;
    const auto known = block.copies.find({offset, bytes});
    if (stats.paused == 0) {
        return known == block.copies.end() ? nullptr : known->second.bytes.get();
    }
    if (block.disk) {
        return nullptr;
    }
    if (!block.backup) {
        return none(
            "they were paused without a backup; enable the CPU backup before the allocation");
    }
    if (known != block.copies.end() && known->second.generation == stats.generation) {
        return known->second.bytes.get();
    }
    HostCopy copy;
    if (known != block.copies.end()) {
        // Keep the address: a caller may still use the pointer.
        copy.bytes = std::move(known->second.bytes);
    } else {
        copy.bytes.reset(new std::uint8_t[bytes == 0 ? 1 : bytes]);
    }
    std::uint8_t* const into = copy.bytes.get();
    void* const first = reinterpret_cast<void*>(start);
    const int code =
        fail_with(Core::found().region_get_backup(home->region, first, offset, into, bytes));
    copy.generation = code == success ? stats.generation : 0;
    if (known != block.copies.end()) {
        known->second = std::move(copy);
    } else if (code == success) {
        block.copies.emplace(std::pair(offset, bytes), std::move(copy));
    }
    return code == success ? into : nullptr;
}

}  // namespace vmmgraph::memory_saver
