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
// ATen/cuda/CUDAContextLight.h, which would pull in cuBLAS's headers; the handle is a pointer, and looking it up is what makes torch keep a
// workspace. Without an argument up to torch 2.11, with one since.
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle() __attribute__((weak));
TORCH_CUDA_CPP_API void* getCurrentCUDABlasHandle(bool setup) __attribute__((weak));
// The same header: since torch 2.8 and 2.9. References to a map; from 2.10 on to a struct that begins with it.
TORCH_CUDA_CPP_API char& cublas_handle_stream_to_workspace() __attribute__((weak));
TORCH_CUDA_CPP_API char& cublaslt_handle_stream_to_workspace() __attribute__((weak));
// Their size in bytes, which programs may change from 2.13 on; 2.12 declares it and has it not.
TORCH_CUDA_CPP_API std::size_t getChosenWorkspaceSize() __attribute__((weak));
// Whether torch keeps any by itself: from 2.15 on only if it is told to.
TORCH_CUDA_CPP_API bool isCUDABlasWorkspaceCachingEnabled() __attribute__((weak));
}  // namespace at::cuda

namespace vmmgraph::torch {
namespace {

using compat::workspace_of;
// Handle and stream to workspace.
using Map = compat::WorkspaceMap;
using Key = Map::key_type;
struct MapWithMutex {
    Map map;
    std::shared_mutex mutex;
};

bool tables_are_there() { return &at::cuda::cublas_handle_stream_to_workspace != nullptr; }

using Table = char& (*)();
constexpr Table tables[] = {at::cuda::cublas_handle_stream_to_workspace, at::cuda::cublaslt_handle_stream_to_workspace};

// Calls `use` with a table, which nobody else uses meanwhile; not for one that torch does not have.
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

// With each table.
template <class Use>
void in_tables(Use&& use) {
    for (const auto table : tables) {
        in_table(table, use);
    }
}

// Moves the entries of a stream out of a table.
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

// cuBLAS's handles that products on a device had their workspaces by, of any thread. One is there for life, and torch forgets its workspaces on a
// stream when a graph that was captured there goes (2.14 and later).
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

// Another owner of a workspace, as an entry of a table.
c10::DataPtr entry_of(const KeptWorkspace& kept) { return {kept->get(), new KeptWorkspace(kept), &release_share, kept->device()}; }

// Where CUDA has failed for good, torch's allocator throws at what other streams used, and who lets go of a workspace is a destructor.
void let_go(c10::DataPtr* workspace) noexcept {
    const std::unique_ptr<c10::DataPtr> owner(workspace);
    const auto free = owner->get_deleter();
    try {
        free(owner->release_context());
    } catch (...) {
        // Torch has lost it.
    }
}

// Makes a table's entry one of its owners.
KeptWorkspace share(c10::DataPtr& entry) {
    if (entry.get_deleter() == &release_share) {
        return *static_cast<KeptWorkspace*>(entry.get_context());
    }
    const KeptWorkspace kept(new c10::DataPtr(std::move(entry)), &let_go);
    entry = entry_of(kept);
    return kept;
}

// This thread's cuBLAS handle on a device, for which torch then keeps a workspace on the current stream. A thread has one for life.
void* handle_with_workspace() {
    void* (*const with_setup)(bool) = at::cuda::getCurrentCUDABlasHandle;
    void* (*const without)() = at::cuda::getCurrentCUDABlasHandle;
    return with_setup != nullptr ? with_setup(true) : without != nullptr ? without() : nullptr;
}

thread_local std::unordered_map<c10::DeviceIndex, void*> handles;

// Bytes that torch's allocator was asked for at an address; 0: it has nothing there.
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

// Bytes of torch's workspaces; 0: not known. The stream is torch's current one.
std::size_t chosen_bytes(const c10::cuda::CUDAStream& stream) {
    if (&at::cuda::getChosenWorkspaceSize != nullptr) {
        return at::cuda::getChosenWorkspaceSize();
    }
    // The same for all devices, for life.
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

    // As torch's tables have it, which is an owner of it.
    static c10::DataPtr entry_of(const std::shared_ptr<Pages>& pages, c10::DeviceIndex device) {
        auto* const address = reinterpret_cast<void*>(bridge::workspace_address(*pages->pages));
        return {address, new std::shared_ptr<Pages>(pages), [](void* context) { delete static_cast<std::shared_ptr<Pages>*>(context); },
                c10::Device(c10::kCUDA, device)};
    }
};

Workspace::Workspace(c10::DeviceIndex device, std::shared_ptr<Memory> shape) : device_(device), shape_(std::move(shape)) {}

std::shared_ptr<Workspace> Workspace::of(const SharedVmmAllocator& arena, const std::shared_ptr<Memory>& shape) {
    static std::mutex mutex;
    // Handles are never used twice, so an arena cannot find another's.
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
        known = workspace = std::make_shared<Workspace>(device, workspace || first ? nullptr : shape);
    }
    return workspace;
}

bool Workspace::keep() {
    const std::lock_guard lock(mutex_);
    if (shape_ && pages_ && !bridge::keep_workspace(*pages_->pages)) {
        return false;
    }
    // Where it was not needed yet it will be torch's memory.
    shape_.reset();
    return true;
}

std::shared_ptr<Workspace::Pages> Workspace::make(std::size_t bytes) const {
    std::shared_ptr<Memory> shape;
    {
        const std::lock_guard lock(mutex_);
        shape = memory_ ? nullptr : shape_;
    }
    auto pages = std::make_shared<Pages>();
    if (!shape || bytes == 0 || shape->make_workspace(*pages->pages, bytes) != VMMGRAPH_OK) {
        return nullptr;
    }
    pages->bytes = bytes;
    return pages;
}

void Workspace::provide(const c10::cuda::CUDAStream& stream, const std::vector<void*>& others) {
    if (&at::cuda::isCUDABlasWorkspaceCachingEnabled != nullptr && !at::cuda::isCUDABlasWorkspaceCachingEnabled()) {
        const Relaxed relaxed;
        // A capture can make none, and this may be the thread's first product.
        if (auto& handle = handles[stream.device_index()]; handle == nullptr) {
            handle = handle_with_workspace();
        }
        return;
    }
    const auto chosen = chosen_bytes(stream);
    // Reclaimers may be asked, which is done without a lock.
    auto made = make(chosen);
    const std::lock_guard lock(mutex_);
    if (chosen != bytes_) {
        if (memory_) {
            // Graphs that were captured with the old one have it.
            earlier_.push_back(std::move(memory_));
            memory_.reset();
        }
        bytes_ = chosen;
    }
    if (made && shape_ && !pages_) {
        pages_ = std::move(made);
        memory_ = std::make_shared<c10::DataPtr>(Pages::entry_of(pages_, stream.device_index()));
    }
    // Making a handle would break a capture that this thread has under way on another device.
    const Relaxed relaxed;
    auto& handle = handles[stream.device_index()];
    if (!memory_ || handle == nullptr) {
        handle = handle_with_workspace();
    }
    // What torch made for us, and ours takes the place of; freed without a lock.
    std::vector<c10::DataPtr> replaced;
    // cuBLASLt's has none of this size.
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

vmmgraph_status_t Workspace::use_on(const Memory& shape, const c10::cuda::CUDAStream& stream) {
    return use(shape, lasts(stream) ? reinterpret_cast<std::uintptr_t>(stream.stream()) : anywhere);
}

vmmgraph_status_t Workspace::use_anywhere(const Memory& shape) { return use(shape, anywhere); }

vmmgraph_status_t Workspace::use(const Memory& shape, std::uintptr_t stream) {
    const auto used = used_.load(std::memory_order_relaxed);
    // What a default stream's handle means depends on the thread and its context.
    constexpr std::uintptr_t last_default = 2;
    if (used == anywhere || (used == stream && stream > last_default)) {
        return VMMGRAPH_OK;
    }
    std::shared_ptr<Pages> pages;
    {
        const std::lock_guard lock(mutex_);
        // Where it is the arena's or torch's memory, its page stays.
        pages = shape_ ? pages_ : nullptr;
    }
    bool alone = stream == anywhere || !pages;
    const auto status = pages ? shape.use_workspace(*pages->pages, alone ? nullptr : reinterpret_cast<void*>(stream), alone) : VMMGRAPH_OK;
    if (status == VMMGRAPH_OK) {
        used_.store(alone ? anywhere : stream, std::memory_order_relaxed);
    }
    return status;
}

std::size_t Workspace::bytes() const {
    const std::lock_guard lock(mutex_);
    return pages_ ? pages_->bytes : bytes_;
}

void Workspace::leave(const Memory& shape, const LastStream& last, const std::vector<KeptWorkspace>& kept) noexcept {
    const std::lock_guard lock(mutex_);
    if (pages_) {
        shape.leave_workspace(*pages_->pages);
    }
    try {
        const auto stream = last.get(device_);
        // Of what is not torch's memory torch notes nothing.
        const auto note = [&](const KeptWorkspace& memory) {
            if (stream && memory) {
                c10::cuda::CUDACachingAllocator::recordStream(*memory, *stream);
            }
        };
        std::for_each(earlier_.begin(), earlier_.end(), note);
        note(memory_);
        std::for_each(kept.begin(), kept.end(), note);
    } catch (...) {
        // Torch has lost them.
    }
}

struct WorkspaceTable::Saved {
    // Of each table, in their order.
    std::vector<Map> tables;
};

WorkspaceTable::WorkspaceTable(Workspace& workspace, const c10::cuda::CUDAStream& stream)
    : stream_(stream), saved_(std::make_unique<Saved>()) {
    // A graph must not bake in what steps aside.
    forget_scoped_workspaces();
    std::vector<void*> others;
    if (tables_are_there()) {
        others = handles_seen(stream_.device_index());
        in_tables([this](Map& table) { saved_->tables.push_back(take(table, stream_.stream())); });
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
        // Out of host memory: the table keeps what it has.
    }
}

std::vector<KeptWorkspace> WorkspaceTable::end(const Memory& memory) {
    restore();
    std::vector<KeptWorkspace> kept;
    // Freed when no lock of torch's is held.
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
                // Those of another capture go with it.
                if (workspace.device().index() == stream_.device_index() && !registry::owner_of(workspace.get())) {
                    kept.push_back(share(workspace));
                }
                ++entry;
            }
        });
    }
    return kept;
}

// The stream's entries are again what they were.
void WorkspaceTable::restore() {
    if (!saved_) {
        return;
    }
    const auto saved = std::move(saved_);
    if (!tables_are_there()) {
        at::cuda::clearCublasWorkspaces();
        return;
    }
    // Freed when no lock of torch's is held.
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
        // Freed when no lock of torch's is held.
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
        // Out of host memory: what is left goes the next time.
    }
}

void forget_scoped_workspaces() noexcept {
    forget_workspaces([](const void* workspace) {
        const auto owner = registry::owner_of(workspace);
        return dynamic_cast<const RegionMemory*>(owner.get()) != nullptr || dynamic_cast<const EagerMemory*>(owner.get()) != nullptr;
    });
}

}  // namespace vmmgraph::torch
