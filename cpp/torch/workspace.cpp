#include "workspace.hpp"

#include <map>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "eager_memory.hpp"
#include "on_device.hpp"
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
// Their size in bytes, which programs may change from 2.13 on.
TORCH_CUDA_CPP_API std::size_t getChosenWorkspaceSize() __attribute__((weak));
}  // namespace at::cuda

namespace vmmgraph::torch {
namespace {

// Handle and stream to workspace.
using Key = std::tuple<void*, void*>;
using Map = std::map<Key, c10::DataPtr>;
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

void release_share(void* context) { delete static_cast<KeptWorkspace*>(context); }

// Another owner of a workspace, as an entry of a table.
c10::DataPtr entry_of(const KeptWorkspace& kept) { return {kept->get(), new KeptWorkspace(kept), &release_share, kept->device()}; }

// Makes a table's entry one of its owners.
KeptWorkspace share(c10::DataPtr& entry) {
    if (entry.get_deleter() == &release_share) {
        return *static_cast<KeptWorkspace*>(entry.get_context());
    }
    auto kept = std::make_shared<c10::DataPtr>(std::move(entry));
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

}  // namespace

std::shared_ptr<Workspace> Workspace::of(const SharedVmmAllocator& arena) {
    static std::mutex mutex;
    // Handles are never used twice, so an arena cannot find another's.
    static auto* const all = new std::unordered_map<vmmgraph_arena_t, std::weak_ptr<Workspace>>;
    const std::lock_guard lock(mutex);
    std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
    auto& known = (*all)[arena.handle()];
    auto workspace = known.lock();
    if (!workspace) {
        known = workspace = std::make_shared<Workspace>();
    }
    return workspace;
}

void Workspace::provide(const c10::cuda::CUDAStream& stream) {
    const std::lock_guard lock(mutex_);
    const auto bytes = &at::cuda::getChosenWorkspaceSize != nullptr ? at::cuda::getChosenWorkspaceSize() : bytes_;
    if (bytes != bytes_) {
        // Graphs that were captured with the old one have it.
        memory_.reset();
        bytes_ = bytes;
    }
    // Making a handle would break a capture that this thread has under way on another device.
    const Relaxed relaxed;
    auto& handle = handles[stream.device_index()];
    if (!memory_ || handle == nullptr) {
        handle = handle_with_workspace();
    }
    // What torch made for us, and ours takes the place of; freed without a lock.
    c10::DataPtr replaced;
    // cuBLASLt's has none of this size.
    in_table(tables[0], [&](Map& table) {
        const Key key{handle, stream.stream()};
        const auto entry = table.find(key);
        if (memory_) {
            if (entry != table.end()) {
                replaced = std::exchange(entry->second, entry_of(memory_));
            } else {
                table.emplace(key, entry_of(memory_));
            }
        } else if (entry != table.end()) {
            memory_ = share(entry->second);
        }
    });
}

void Workspace::record_stream(const c10::cuda::CUDAStream& stream) const {
    const std::lock_guard lock(mutex_);
    if (memory_) {
        c10::cuda::CUDACachingAllocator::recordStream(*memory_, stream);
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
    if (tables_are_there()) {
        in_tables([this](Map& table) { saved_->tables.push_back(take(table, stream_.stream())); });
    } else {
        at::cuda::clearCublasWorkspaces();
    }
    try {
        if (tables_are_there()) {
            workspace.provide(stream);
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
                auto& [key, workspace] = *entry;
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
                if (there(entry->second.get())) {
                    forgotten.push_back(std::move(entry->second));
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
