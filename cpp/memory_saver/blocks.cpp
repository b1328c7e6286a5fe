#include "blocks.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "forks.hpp"

namespace vmmgraph::memory_saver {

std::optional<vmmgraph_device_t> Blocks::device(int ordinal) {
    const std::lock_guard lock(tables());
    const auto found = devices_.find(ordinal);
    return found == devices_.end() ? std::nullopt : std::optional(found->second);
}

vmmgraph_device_t Blocks::add_device(int ordinal, vmmgraph_device_t device) {
    const std::lock_guard lock(tables());
    return devices_.emplace(ordinal, device).second ? nullptr : device;
}

std::vector<Home*> Blocks::homes(int ordinal, const std::string* tag) {
    const std::lock_guard lock(tables());
    std::vector<Home*> found;
    for (const auto& home : homes_) {
        if (home->ordinal == ordinal && home->tag == tag) {
            found.push_back(home.get());
        }
    }
    return found;
}

Home* Blocks::add_home(const Home& home) {
    const std::lock_guard lock(tables());
    return homes_.emplace_back(std::make_unique<Home>(home)).get();
}

bool Blocks::is_empty(const Home* home) {
    const std::lock_guard lock(tables());
    return home->blocks == 0;
}

void Blocks::add(void* at, Block block) {
    const std::lock_guard lock(tables());
    Home* const home = block.home;
    blocks_.insert_or_assign(reinterpret_cast<std::uintptr_t>(at), std::move(block));
    ++home->blocks;
}

Home* Blocks::home_at(const void* at) {
    const std::lock_guard lock(tables());
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(at));
    return found == blocks_.end() ? nullptr : found->second.home;
}

Blocks::Map::node_type Blocks::take(const void* at) {
    const std::lock_guard lock(tables());
    auto block = blocks_.extract(reinterpret_cast<std::uintptr_t>(at));
    if (block) {
        --block.mapped().home->blocks;
    }
    return block;
}

void Blocks::put_back(Map::node_type block) noexcept {
    const std::lock_guard lock(tables());
    ++block.mapped().home->blocks;
    blocks_.insert(std::move(block));
}

Home* Blocks::home_around(const std::uint8_t* at, std::uint64_t bytes) {
    const std::lock_guard lock(tables());
    const auto* const found = find(at, bytes);
    return found == nullptr ? nullptr : found->second.home;
}

Blocks::Map::value_type* Blocks::find(const std::uint8_t* at, std::uint64_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    auto found = blocks_.upper_bound(address);
    if (found == blocks_.begin()) {
        return nullptr;
    }
    --found;
    const std::uint64_t offset = address - found->first;
    const std::uint64_t length = found->second.bytes;
    return offset <= length && bytes <= length - offset ? &*found : nullptr;
}

std::vector<Selection> Blocks::select(const char* tag) {
    const std::lock_guard lock(tables());
    std::map<int, Selection> found;
    for (const auto& home : homes_) {
        const char* const name = home->tag->c_str();
        if (tag != nullptr && *home->tag != tag) {
            continue;
        }
        Selection& here =
            found.try_emplace(home->ordinal, Selection{home->ordinal, home->device, {}})
                .first->second;
        if (std::find(here.tags.begin(), here.tags.end(), name) == here.tags.end()) {
            here.tags.push_back(name);
        }
    }
    std::vector<Selection> all;
    for (auto& [ordinal, selection] : found) {
        all.push_back(std::move(selection));
    }
    return all;
}

bool Blocks::covers(const Selection& here, const Block& block) {
    return block.home->ordinal == here.ordinal &&
           std::find(here.tags.begin(), here.tags.end(), block.home->tag->c_str()) !=
               here.tags.end();
}

void Blocks::drop_copies(const Selection& resumed) {
    const std::lock_guard lock(tables());
    for (auto& [at, block] : blocks_) {
        if (covers(resumed, block)) {
            block.copies.clear();
        }
    }
}

bool Blocks::is_on_disk(const void* at) {
    const std::lock_guard lock(tables());
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(at));
    return found != blocks_.end() && found->second.disk;
}

bool Blocks::returns_host(const Selection& here) {
    const std::lock_guard lock(tables());
    return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
        return entry.second.returns_host && covers(here, entry.second);
    });
}

std::vector<std::pair<void*, Block*>> Blocks::on_disk(const Selection& here) {
    const std::lock_guard lock(tables());
    std::vector<std::pair<void*, Block*>> found;
    for (auto& [at, block] : blocks_) {
        if (block.disk && covers(here, block)) {
            found.emplace_back(reinterpret_cast<void*>(at), &block);
        }
    }
    return found;
}

void Blocks::remove_files() noexcept {
    const std::lock_guard lock(tables());
    for (auto& [at, block] : blocks_) {
        block.file.remove();
    }
}

}  // namespace vmmgraph::memory_saver
