#include "workspace.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>

#include "eager_memory.hpp"
#include "guards.hpp"
#include "region_memory.hpp"
#include "registry.hpp"

namespace at::cuda {
// Declared in ATen/cuda/CUDAContextLight.h, which pulls in cuBLAS headers; the handle is a pointer.
// Calling this makes torch create a workspace. Without an argument up to torch 2.11, with one
// since.
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle() __attribute__((weak));
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle(bool setup) __attribute__((weak));
// From the same header, since torch 2.8 and 2.9. References to a map; since 2.10 to a struct that
// begins with the map.
TORCH_CUDA_CPP_API char& cublas_handle_stream_to_workspace() __attribute__((weak));
TORCH_CUDA_CPP_API char& cublaslt_handle_stream_to_workspace() __attribute__((weak));
// Workspace size in bytes. Programs can change the size since 2.13; torch 2.12 declares the
// function without defining it.
TORCH_CUDA_CPP_API std::size_t getChosenWorkspaceSize() __attribute__((weak));
// Whether torch caches workspaces: since 2.15 only if the program enables caching.
TORCH_CUDA_CPP_API bool isCUDABlasWorkspaceCachingEnabled() __attribute__((weak));
}  // namespace at::cuda

namespace at::native {
// Declared in ATen/cudnn/Handle.h, which pulls in cuDNN's headers; the handle is a pointer.
TORCH_CUDA_CPP_API void* getCudnnHandle() __attribute__((weak));
}  // namespace at::native

namespace vmmgraph::torch {
namespace {

using compat::workspace_of;
using Map = compat::WorkspaceMap;
using Key = Map::key_type;
struct MapWithMutex {
    Map map;
    std::shared_mutex mutex;
};

bool tables_are_there() { return &at::cuda::cublas_handle_stream_to_workspace != nullptr; }

using Table = char& (*)();
constexpr Table tables[] = {at::cuda::cublas_handle_stream_to_workspace,
                            at::cuda::cublaslt_handle_stream_to_workspace};

template <class Use>
void in_table(Table table, Use&& use) {
    if (table == nullptr) {
        return;
    }
    if constexpr (compat::workspaces_have_mutex) {
        auto& found = reinterpret_cast<MapWithMutex&>(table());
        const std::unique_lock lock(found.mutex);
        use(found.map);
    } else {
        use(reinterpret_cast<Map&>(table()));
    }
}

template <class Use>
void in_tables(Use&& use) {
    for (const auto table : tables) {
        in_table(table, use);
    }
}

Map take(Map& table, cudaStream_t stream) {
    Map taken;
    for (auto entry = table.begin(); entry != table.end();) {
        const auto next = std::next(entry);
        if (std::get<1>(entry->first) == stream) {
            taken.insert(table.extract(entry));
        }
        entry = next;
    }
    return taken;
}

// All cuBLAS handles seen on a device, of any thread and never destroyed. Torch drops a captured
// stream's workspaces with the graph (2.14 and later), so the handles are remembered.
std::vector<void*> handles_seen(c10::DeviceIndex device) {
    static std::mutex mutex;
    static auto* const all = new std::unordered_map<c10::DeviceIndex, std::set<void*>>;
    std::set<void*> now;
    in_table(tables[0], [&](Map& table) {
        for (auto& [key, entry] : table) {
            if (workspace_of(entry).device().index() == device) {
                now.insert(std::get<0>(key));
            }
        }
    });
    const std::lock_guard lock(mutex);
    auto& seen = (*all)[device];
    seen.merge(now);
    return {seen.begin(), seen.end()};
}

void release_share(void* context) { delete static_cast<KeptWorkspace*>(context); }

c10::DataPtr entry_of(const KeptWorkspace& kept) {
    return {kept->get(), new KeptWorkspace(kept), &release_share, kept->device()};
}

// After a fatal CUDA error, torch's allocator throws for memory used on several streams, and the
// caller may be a destructor.
void let_go(c10::DataPtr* workspace) noexcept {
    const std::unique_ptr<c10::DataPtr> owner(workspace);
    const auto free = owner->get_deleter();
    try {
        free(owner->release_context());
    } catch (...) {
        // Torch has lost the memory.
    }
}

// Makes a table entry shared, and returns a second owner.
KeptWorkspace share(c10::DataPtr& entry) {
    if (entry.get_deleter() == &release_share) {
        return *static_cast<KeptWorkspace*>(entry.get_context());
    }
    const KeptWorkspace kept(new c10::DataPtr(std::move(entry)), &let_go);
    entry = entry_of(kept);
    return kept;
}

// This thread's cuBLAS handle on the current device, never destroyed. Torch keeps a workspace for
// the handle on the current stream.
void* handle_with_workspace() {
    void* (*const with_setup)(bool) = at::cuda::getCurrentCUDABlasHandle;
    void* (*const without)() = at::cuda::getCurrentCUDABlasHandle;
    return with_setup != nullptr ? with_setup(true) : without != nullptr ? without() : nullptr;
}

thread_local std::unordered_map<c10::DeviceIndex, void*> handles;

// Requested size of torch's block at an address; 0 if none.
std::size_t bytes_asked_at(const void* address) {
    for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
        auto at = segment.address;
        for (const auto& block : segment.blocks) {
            if (at == reinterpret_cast<std::uintptr_t>(address)) {
                return block.requested_size;
            }
            at += block.size;
        }
    }
    return 0;
}

// Size of torch's workspaces; 0 if unknown. `stream` must be torch's current stream.
std::size_t chosen_bytes(const c10::cuda::CUDAStream& stream) {
    if (&at::cuda::getChosenWorkspaceSize != nullptr) {
        return at::cuda::getChosenWorkspaceSize();
    }
    // Constant for the process and equal on all devices.
    static std::atomic<std::size_t> seen{0};
    if (seen.load() == 0) {
        const Relaxed relaxed;
        auto* const handle = handle_with_workspace();
        const void* made = nullptr;
        in_table(tables[0], [&](Map& table) {
            if (const auto found = table.find(Key{handle, stream.stream()}); found != table.end()) {
                made = workspace_of(found->second).get();
            }
        });
        seen.store(made != nullptr ? bytes_asked_at(made) : 0);
    }
    return seen.load();
}

}  // namespace

struct Workspace::Pages {
    rust::Box<bridge::Workspace> pages = bridge::no_workspace();
    std::size_t bytes = 0;

    // Table entry with shared ownership.
    static c10::DataPtr entry_of(const std::shared_ptr<Pages>& pages, c10::DeviceIndex device) {
        auto* const address = reinterpret_cast<void*>(bridge::workspace_address(*pages->pages));
        return {address, new std::shared_ptr<Pages>(pages),
                [](void* context) { delete static_cast<std::shared_ptr<Pages>*>(context); },
                c10::Device(c10::kCUDA, device)};
    }
};

Workspace::Workspace(c10::DeviceIndex device, std::shared_ptr<Memory> group)
    : device_(device), group_(std::move(group)) {}

std::shared_ptr<Workspace> Workspace::of(const SharedVmmAllocator& arena,
                                         const std::shared_ptr<Memory>& group) {
    static std::mutex mutex;
    // Arena handles are never reused, so each entry belongs to one arena.
    static auto* const all = new std::unordered_map<vmmgraph_arena_t, std::weak_ptr<Workspace>>;
    const std::lock_guard lock(mutex);
    std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
    const auto device = device_of(arena).index();
    const bool first = std::none_of(all->begin(), all->end(), [&](const auto& one) {
        const auto other = one.second.lock();
        return other && other->device_ == device;
    });
    auto& known = (*all)[arena.handle()];
    auto workspace = known.lock();
    if (!workspace || !workspace->keep()) {
        known = workspace =
            std::make_shared<Workspace>(device, workspace || first ? nullptr : group);
    }
    return workspace;
}

bool Workspace::keep() {
    const std::lock_guard lock(mutex_);
    if (group_ && pages_ && !bridge::keep_workspace(*pages_->pages)) {
        return false;
    }
    // If not allocated yet, the workspace will be torch's memory.
    group_.reset();
    return true;
}

std::shared_ptr<Workspace::Pages> Workspace::make(std::size_t bytes) const {
    std::shared_ptr<Memory> group;
    {
        const std::lock_guard lock(mutex_);
        group = memory_ ? nullptr : group_;
    }
    auto pages = std::make_shared<Pages>();
    if (!group || bytes == 0 || group->make_workspace(*pages->pages, bytes) != VMMGRAPH_OK) {
        return nullptr;
    }
    pages->bytes = bytes;
    return pages;
}

void Workspace::provide(const c10::cuda::CUDAStream& stream, const std::vector<void*>& others) {
    if (&at::cuda::isCUDABlasWorkspaceCachingEnabled != nullptr &&
        !at::cuda::isCUDABlasWorkspaceCachingEnabled()) {
        const Relaxed relaxed;
        // A capture cannot create a handle.
        if (auto& handle = handles[stream.device_index()]; handle == nullptr) {
            handle = handle_with_workspace();
        }
        return;
    }
    const auto chosen = chosen_bytes(stream);
    // Without a lock: may call reclaimers.
    auto made = make(chosen);
    const std::lock_guard lock(mutex_);
    if (chosen != bytes_) {
        if (memory_) {
            // Captured graphs contain the old address.
            earlier_.push_back(std::move(memory_));
            memory_.reset();
        }
        bytes_ = chosen;
    }
    if (made && group_ && !pages_) {
        pages_ = std::move(made);
        memory_ = std::make_shared<c10::DataPtr>(Pages::entry_of(pages_, stream.device_index()));
    }
    // Creating a handle would break this thread's capture on a second device.
    const Relaxed relaxed;
    auto& handle = handles[stream.device_index()];
    if (!memory_ || handle == nullptr) {
        handle = handle_with_workspace();
    }
    std::vector<c10::DataPtr> replaced;
    // cuBLASLt's table has no workspace of this size.
    in_table(tables[0], [&](Map& table) {
        const auto own = table.find(Key{handle, stream.stream()});
        if (!memory_ && own != table.end()) {
            memory_ = share(workspace_of(own->second));
        }
        if (!memory_) {
            return;
        }
        auto all = others;
        all.push_back(handle);
        for (auto* const each : all) {
            const auto [entry, made] = table.try_emplace(Key{each, stream.stream()});
            replaced.push_back(std::exchange(workspace_of(entry->second), entry_of(memory_)));
            compat::set_workspace_size(entry->second, bytes_);
        }
    });
}

vmmgraph_status_t Workspace::use_on(const Memory& group, const c10::cuda::CUDAStream& stream) {
    return use(group, lasts(stream) ? reinterpret_cast<std::uintptr_t>(stream.stream()) : anywhere);
}

vmmgraph_status_t Workspace::use_anywhere(const Memory& group) { return use(group, anywhere); }

vmmgraph_status_t Workspace::use(const Memory& group, std::uintptr_t stream) {
    const auto used = used_.load(std::memory_order_relaxed);
    // A default stream's handle depends on the thread and context.
    constexpr std::uintptr_t last_default = 2;
    if (used == anywhere || (used == stream && stream > last_default)) {
        return VMMGRAPH_OK;
    }
    std::shared_ptr<Pages> pages;
    {
        const std::lock_guard lock(mutex_);
        pages = group_ ? pages_ : nullptr;
    }
    bool alone = stream == anywhere || !pages;
    const auto status =
        pages ? group.use_workspace(*pages->pages,
                                    alone ? nullptr : reinterpret_cast<void*>(stream), alone)
              : VMMGRAPH_OK;
    if (status == VMMGRAPH_OK) {
        used_.store(alone ? anywhere : stream, std::memory_order_relaxed);
    }
    return status;
}

std::size_t Workspace::bytes() const {
    const std::lock_guard lock(mutex_);
    return pages_ ? pages_->bytes : bytes_;
}

void Workspace::leave(const Memory& group, const LastStream& last,
                      const std::vector<KeptWorkspace>& kept) noexcept {
    const std::lock_guard lock(mutex_);
    if (pages_) {
        group.leave_workspace(*pages_->pages);
    }
    try {
        const auto stream = last.get(device_);
        // Torch ignores memory it does not own.
        const auto note = [&](const KeptWorkspace& memory) {
            if (stream && memory) {
                c10::cuda::CUDACachingAllocator::recordStream(*memory, *stream);
            }
        };
        std::for_each(earlier_.begin(), earlier_.end(), note);
        note(memory_);
        std::for_each(kept.begin(), kept.end(), note);
    } catch (...) {
        // Torch has lost the memory.
    }
}

void make_handles(c10::Device device, void* stream) noexcept {
    try {
        const OnStream current(device, stream);
        const Relaxed relaxed;
        static_cast<void>(handle_with_workspace());
        if (&at::native::getCudnnHandle != nullptr) {
            static_cast<void>(at::native::getCudnnHandle());
        }
    } catch (const std::exception&) {
        static_cast<void>(cudaGetLastError());
    }
}

struct WorkspaceTable::Saved {
    std::vector<Map> tables;
};

WorkspaceTable::WorkspaceTable(Workspace& workspace, const c10::cuda::CUDAStream& stream,
                               bool free_workspace)
    : stream_(stream), saved_(std::make_unique<Saved>()) {
    // A graph must not contain the address of memory that can be paused.
    forget_scoped_workspaces();
    std::vector<void*> others;
    if (tables_are_there()) {
        others = handles_seen(stream_.device_index());
        in_tables([this](Map& table) { saved_->tables.push_back(take(table, stream_.stream())); });
        if (free_workspace) {
            for (auto& table : saved_->tables) {
                table.clear();
            }
        }
    } else {
        at::cuda::clearCublasWorkspaces();
    }
    try {
        if (tables_are_there()) {
            workspace.provide(stream, others);
        }
    } catch (...) {
        restore();
        throw;
    }
}

WorkspaceTable::~WorkspaceTable() {
    try {
        restore();
    } catch (...) {
        // Out of host memory: the table keeps the current entries.
    }
}

std::vector<KeptWorkspace> WorkspaceTable::end(const Memory& memory) {
    restore();
    std::vector<KeptWorkspace> kept;
    std::vector<c10::DataPtr> brought;
    if (tables_are_there()) {
        in_tables([&](Map& table) {
            for (auto entry = table.begin(); entry != table.end();) {
                auto& workspace = workspace_of(entry->second);
                if (memory.contains(workspace.get())) {
                    brought.push_back(std::move(workspace));
                    entry = table.erase(entry);
                    continue;
                }
                // Another capture's workspaces end with that capture.
                if (workspace.device().index() == stream_.device_index() &&
                    !registry::owner_of(workspace.get())) {
                    kept.push_back(share(workspace));
                }
                ++entry;
            }
        });
    }
    return kept;
}

void WorkspaceTable::restore() {
    if (!saved_) {
        return;
    }
    const auto saved = std::move(saved_);
    if (!tables_are_there()) {
        at::cuda::clearCublasWorkspaces();
        return;
    }
    std::vector<Map> brought;
    auto before = saved->tables.begin();
    in_tables([&](Map& table) {
        brought.push_back(take(table, stream_.stream()));
        table.merge(*before++);
    });
}

void forget_workspaces(const std::function<bool(const void*)>& there) noexcept {
    try {
        if (!tables_are_there()) {
            at::cuda::clearCublasWorkspaces();
            return;
        }
        std::vector<c10::DataPtr> forgotten;
        in_tables([&](Map& table) {
            for (auto entry = table.begin(); entry != table.end();) {
                if (auto& workspace = workspace_of(entry->second); there(workspace.get())) {
                    forgotten.push_back(std::move(workspace));
                    entry = table.erase(entry);
                } else {
                    ++entry;
                }
            }
        });
    } catch (...) {
        // Out of host memory: the rest is removed next time.
    }
}

void forget_scoped_workspaces() noexcept {
    forget_workspaces([](const void* workspace) {
        const auto owner = registry::owner_of(workspace);
        return dynamic_cast<const RegionMemory*>(owner.get()) != nullptr ||
               dynamic_cast<const EagerMemory*>(owner.get()) != nullptr;
    });
}

}  // namespace vmmgraph::torch
