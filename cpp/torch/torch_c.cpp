// The C functions of torch_c.h: handles to graph groups, and errors as status codes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_c.h>
#include <vmmgraph/torch_eager.hpp>

#include "eager_ending.hpp"
#include "guards.hpp"
#include "graph_group.hpp"
#include "torchs_pool.hpp"

namespace vmmgraph::torch {
namespace {

// Error of this thread's last call.
std::string& message() {
    thread_local std::string text;
    return text;
}

vmmgraph_status_t failed(vmmgraph_status_t status, const char* why) noexcept {
    try {
        message() = why;
    } catch (...) {
        // Out of host memory: the caller gets the status only.
    }
    return status;
}

// Converts exceptions to a status.
template <class Body>
vmmgraph_status_t guarded(Body&& body) noexcept {
    try {
        message().clear();
        body();
        return VMMGRAPH_OK;
    } catch (const Error& error) {
        return failed(error.status(), error.what());
    } catch (const c10::OutOfMemoryError& error) {
        return failed(VMMGRAPH_ERROR_OUT_OF_MEMORY, error.what_without_backtrace());
    } catch (const c10::Error& error) {
        return failed(VMMGRAPH_ERROR_DRIVER, error.what_without_backtrace());
    } catch (const std::bad_alloc&) {
        return failed(VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY,
                      "vmmgraph: cannot complete the call: out of host memory; free host memory "
                      "and repeat the call");
    } catch (const std::exception& error) {
        return failed(VMMGRAPH_ERROR_INTERNAL, error.what());
    } catch (...) {
        return failed(VMMGRAPH_ERROR_INTERNAL,
                      "vmmgraph: cannot complete the call: an exception of an unknown type "
                      "arrived; report this message");
    }
}

template <class T>
T& required(T* pointer, const char* name) {
    if (pointer == nullptr) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT,
               std::string("cannot use argument ") + name +
                   ": the pointer is null; pass the address of a value");
    }
    return *pointer;
}

// Checks a caller's struct. Shorter structs do not exist: each struct is as old as its functions.
template <class T>
T& sized(T* given, const char* name) {
    if (const auto size = required(given, name).struct_size;
        size < sizeof(T) || size > 4096 || size % 8 != 0) {
        refuse(VMMGRAPH_ERROR_STRUCT_SIZE, std::string("cannot use argument ") + name +
                                               ": struct_size is " + std::to_string(size) +
                                               " and the struct has " + std::to_string(sizeof(T)) +
                                               " bytes; set struct_size to the size of the struct");
    }
    return *given;
}

class GraphGroups {
public:
    // Never destroyed: programs close handles in destructors.
    static GraphGroups& all() {
        static auto* const groups = new GraphGroups;
        return *groups;
    }

    vmmgraph_torch_group_t add(std::shared_ptr<GraphGroup> group) {
        const std::lock_guard lock(mutex_);
        next_ += 16;
        groups_.emplace(next_, std::move(group));
        return reinterpret_cast<vmmgraph_torch_group_t>(next_);
    }
    std::shared_ptr<GraphGroup> find(vmmgraph_torch_group_t handle) {
        const std::lock_guard lock(mutex_);
        const auto found = groups_.find(reinterpret_cast<std::uintptr_t>(handle));
        if (found == groups_.end()) {
            refuse(VMMGRAPH_ERROR_INVALID_HANDLE,
                   "cannot use the graph group: its handle was closed or never opened; open a "
                   "graph group first");
        }
        return found->second;
    }
    // The caller drops the result without the lock.
    std::shared_ptr<GraphGroup> remove(vmmgraph_torch_group_t handle) {
        auto group = find(handle);
        const std::lock_guard lock(mutex_);
        if (groups_.erase(reinterpret_cast<std::uintptr_t>(handle)) == 0) {
            refuse(VMMGRAPH_ERROR_INVALID_HANDLE,
                   "cannot close the graph group: another thread has closed it; close a graph "
                   "group once");
        }
        return group;
    }

private:
    std::mutex mutex_;
    std::uintptr_t next_ = 0x76000000;
    std::unordered_map<std::uintptr_t, std::shared_ptr<GraphGroup>> groups_;
};

std::vector<std::unique_ptr<RemoteScope>>& remote_scopes() {
    thread_local std::vector<std::unique_ptr<RemoteScope>> scopes;
    return scopes;
}

// C++ view of an arena owned by the caller.
class Borrowed {
public:
    explicit Borrowed(vmmgraph_arena_t handle) : arena_(SharedVmmAllocator::adopt(handle)) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { static_cast<void>(arena_.release()); }
    SharedVmmAllocator& operator*() { return arena_; }

private:
    SharedVmmAllocator arena_;
};

// At most one eager scope per arena.
class EagerEndings {
public:
    // Never destroyed: threads leave their scopes when they exit.
    static EagerEndings& all() {
        static auto* const endings = new EagerEndings;
        return *endings;
    }

    void add(vmmgraph_arena_t arena, std::shared_ptr<EagerEnding> ending) {
        const std::lock_guard lock(mutex_);
        endings_.insert_or_assign(arena, std::move(ending));
    }
    std::shared_ptr<EagerEnding> find(vmmgraph_arena_t arena) {
        const std::lock_guard lock(mutex_);
        const auto found = endings_.find(arena);
        return found == endings_.end() ? nullptr : found->second;
    }
    void remove(vmmgraph_arena_t arena, const std::shared_ptr<EagerEnding>& ending) noexcept {
        const std::lock_guard lock(mutex_);
        if (const auto found = endings_.find(arena);
            found != endings_.end() && found->second == ending) {
            endings_.erase(found);
        }
    }

private:
    std::mutex mutex_;
    std::unordered_map<vmmgraph_arena_t, std::shared_ptr<EagerEnding>> endings_;
};

// Eager scope that leaves torch's current device and stream unchanged.
class ThreadsEagerScope {
public:
    ThreadsEagerScope(vmmgraph_arena_t handle, std::optional<std::uint64_t> bytes)
        : handle_(handle) {
        Borrowed arena(handle);
        device_ = device_of(*arena).index();
        const auto before = c10::cuda::current_device();
        scope_.emplace(*arena, c10::cuda::getCurrentCUDAStream(device_).stream(), bytes);
        c10::cuda::set_device(before);
        ending_ = EagerEnding::of(*scope_);
        EagerEndings::all().add(handle, ending_);
    }
    ThreadsEagerScope(const ThreadsEagerScope&) = delete;
    ThreadsEagerScope& operator=(const ThreadsEagerScope&) = delete;
    ~ThreadsEagerScope() {
        EagerEndings::all().remove(handle_, ending_);
        try {
            const auto device = c10::cuda::current_device();
            const auto stream = c10::cuda::getCurrentCUDAStream(device_);
            scope_.reset();
            c10::cuda::setCurrentCUDAStream(stream);
            c10::cuda::set_device(device);
        } catch (const std::exception&) {
            // The driver has shut down.
        }
    }

    [[nodiscard]] bool is_of(vmmgraph_arena_t arena) const noexcept {
        return handle_ == arena && !over();
    }
    [[nodiscard]] bool over() const noexcept { return ending_->over(); }
    void end() {
        ending_->end();
        EagerEndings::all().remove(handle_, ending_);
    }

private:
    vmmgraph_arena_t handle_;
    c10::DeviceIndex device_ = -1;
    std::optional<EagerScope> scope_;
    std::shared_ptr<EagerEnding> ending_;
};

std::vector<std::unique_ptr<ThreadsEagerScope>>& eager_scopes() {
    thread_local std::vector<std::unique_ptr<ThreadsEagerScope>> scopes;
    while (!scopes.empty() && scopes.back()->over()) {
        scopes.pop_back();
    }
    return scopes;
}

vmmgraph_status_t enter_eager(vmmgraph_arena_t arena, std::optional<std::uint64_t> bytes) {
    return guarded(
        [&] { eager_scopes().push_back(std::make_unique<ThreadsEagerScope>(arena, bytes)); });
}

template <class Use>
vmmgraph_status_t with(vmmgraph_torch_group_t handle, Use&& use) noexcept {
    return guarded([&] { use(*GraphGroups::all().find(handle)); });
}

void seal(GraphGroup& group, Retain retain, Written written, vmmgraph_seal_report_t* report) {
    if (report != nullptr) {
        static_cast<void>(sized(report, "report"));
    }
    auto sealed = group.seal(retain, written);
    if (report != nullptr) {
        sealed.struct_size = report->struct_size;
        *report = sealed;
    }
}

// Returns the executable pool of the arena's device. Refuses if this torch release cannot lend
// executables.
std::shared_ptr<ExecutablePool> executables_of(vmmgraph_arena_t handle) {
    Borrowed arena(handle);
    if (!compat::GraphOfOthers<at::cuda::CUDAGraph>::lends) {
        refuse(VMMGRAPH_ERROR_UNSUPPORTED, "cannot pool executables: torch " TORCH_VERSION
                                           " keeps no captured graphs; use torch 2.8 or later");
    }
    auto pool = ExecutablePool::of(*arena);
    // Kept alive, so the device's pool keeps its limits while it has no graphs.
    static std::mutex mutex;
    static auto* const kept = new std::unordered_map<const void*, std::shared_ptr<ExecutablePool>>;
    const std::lock_guard lock(mutex);
    return kept->emplace(pool.get(), pool).first->second;
}

}  // namespace
}  // namespace vmmgraph::torch

using namespace vmmgraph::torch;

const char* vmmgraph_torch_built_for(void) { return TORCH_VERSION; }

vmmgraph_status_t vmmgraph_torch_last_error_message(char* buffer, size_t capacity, size_t* needed) {
    const auto& text = message();
    if (needed != nullptr) {
        *needed = text.size() + 1;
    }
    if (buffer != nullptr && capacity > 0) {
        const auto length = std::min(text.size(), capacity - 1);
        std::memcpy(buffer, text.data(), length);
        buffer[length] = '\0';
    }
    return VMMGRAPH_OK;
}

vmmgraph_status_t vmmgraph_torch_install(void) {
    return guarded([] { install(); });
}
vmmgraph_status_t vmmgraph_torch_uninstall(void) {
    return guarded([] { uninstall(); });
}
int32_t vmmgraph_torch_installed(void) { return installed() ? 1 : 0; }

vmmgraph_status_t vmmgraph_torch_group_open(vmmgraph_arena_t arena, vmmgraph_torch_group_t* group) {
    return guarded([&] {
        auto& to = required(group, "group");
        Borrowed borrowed(arena);
        to = GraphGroups::all().add(std::make_shared<GraphGroup>(*borrowed));
    });
}

vmmgraph_status_t vmmgraph_torch_group_space(vmmgraph_torch_group_t group,
                                             vmmgraph_space_t* space) {
    return with(group,
                [&](GraphGroup& found) { required(space, "space") = found.space().handle(); });
}

vmmgraph_status_t vmmgraph_torch_group_close(vmmgraph_torch_group_t group) {
    return guarded([&] { static_cast<void>(GraphGroups::all().remove(group)); });
}

vmmgraph_status_t vmmgraph_torch_capture_begin(vmmgraph_torch_group_t group, uint64_t pool_first,
                                               uint64_t pool_second, int32_t free_workspace) {
    return with(group, [&](GraphGroup& found) {
        found.begin(compat::PoolId(pool_first, pool_second), free_workspace != 0);
    });
}

vmmgraph_status_t vmmgraph_torch_capture_begun(vmmgraph_torch_group_t group) {
    return with(group, [](GraphGroup& found) { found.begun(); });
}

vmmgraph_status_t vmmgraph_torch_capture_end(vmmgraph_torch_group_t group,
                                             const vmmgraph_torch_graph_t* graph,
                                             vmmgraph_torch_captured_t* captured) {
    return with(group, [&](GraphGroup& found) {
        const auto& given = sized(graph, "graph");
        found.end(given, sized(captured, "captured"));
    });
}

vmmgraph_status_t vmmgraph_torch_capture_abandon(vmmgraph_torch_group_t group, uint64_t pool_first,
                                                 uint64_t pool_second) {
    return with(group,
                [&](GraphGroup& found) { found.abandon(compat::PoolId(pool_first, pool_second)); });
}

vmmgraph_status_t vmmgraph_torch_remote_enter(void) {
    return guarded([] { remote_scopes().push_back(std::make_unique<RemoteScope>()); });
}

vmmgraph_status_t vmmgraph_torch_remote_leave(void) {
    return guarded([] {
        if (remote_scopes().empty()) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE,
                   "cannot leave a remote scope: this thread is in none; call "
                   "vmmgraph_torch_remote_enter first");
        }
        remote_scopes().pop_back();
    });
}

vmmgraph_status_t vmmgraph_torch_eager_enter(vmmgraph_arena_t arena) {
    return enter_eager(arena, std::nullopt);
}

vmmgraph_status_t vmmgraph_torch_eager_enter_of(vmmgraph_arena_t arena, uint64_t bytes) {
    return enter_eager(arena, bytes);
}

vmmgraph_status_t vmmgraph_torch_eager_leave(void) {
    return guarded([] {
        if (eager_scopes().empty()) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE,
                   "cannot leave an eager scope: this thread is in none; call "
                   "vmmgraph_torch_eager_enter first");
        }
        eager_scopes().pop_back();
    });
}

vmmgraph_status_t vmmgraph_torch_eager_leave_of(vmmgraph_arena_t arena) {
    return guarded([&] {
        auto& scopes = eager_scopes();
        const auto found = std::find_if(scopes.begin(), scopes.end(),
                                        [&](const auto& scope) { return scope->is_of(arena); });
        if (found == scopes.end()) {
            return;
        }
        if (*found == scopes.back()) {
            scopes.pop_back();
        } else {
            (*found)->end();
        }
    });
}

vmmgraph_status_t vmmgraph_torch_eager_end(vmmgraph_arena_t arena) {
    return guarded([&] {
        const auto ending = EagerEndings::all().find(arena);
        if (!ending || ending->over()) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE,
                   "cannot end the eager scope: the arena has none; call "
                   "vmmgraph_torch_eager_enter first");
        }
        ending->end();
        EagerEndings::all().remove(arena, ending);
        static_cast<void>(eager_scopes());
    });
}

vmmgraph_status_t vmmgraph_torch_pool_empty(int32_t device, uint64_t pool_first,
                                            uint64_t pool_second) {
    return guarded([&] {
        if (device < 0 || device > std::numeric_limits<c10::DeviceIndex>::max()) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot empty the pool: device is " +
                                                        std::to_string(device) +
                                                        "; pass the number of a CUDA device");
        }
        empty_torchs_pool(static_cast<c10::DeviceIndex>(device),
                          compat::PoolId(pool_first, pool_second));
    });
}

vmmgraph_status_t vmmgraph_torch_group_seal(vmmgraph_torch_group_t group, int32_t retain,
                                            vmmgraph_seal_report_t* report) {
    return with(group, [&](GraphGroup& found) {
        if (retain < VMMGRAPH_RETAIN_DEFAULT || retain > VMMGRAPH_RETAIN_SHARED_REMOTE) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot seal the graph group: retain is " +
                                                        std::to_string(retain) +
                                                        "; pass one of VMMGRAPH_RETAIN_*");
        }
        seal(found, static_cast<vmmgraph::Retain>(retain), Written::perhaps, report);
    });
}

vmmgraph_status_t vmmgraph_torch_group_seal_unwritten(vmmgraph_torch_group_t group,
                                                      vmmgraph_seal_report_t* report) {
    return with(group, [&](GraphGroup& found) {
        seal(found, vmmgraph::Retain::inherit, Written::no, report);
    });
}

vmmgraph_status_t vmmgraph_torch_group_instantiate(vmmgraph_torch_group_t group,
                                                   int32_t* instantiated) {
    return with(group, [&](GraphGroup& found) {
        const bool has = found.instantiate();
        if (instantiated != nullptr) {
            *instantiated = has ? 1 : 0;
        }
    });
}

vmmgraph_status_t vmmgraph_torch_replay(vmmgraph_torch_group_t group, uint64_t piece) {
    return with(group, [&](GraphGroup& found) { found.replay(piece); });
}

vmmgraph_status_t vmmgraph_torch_launched_by_hand(vmmgraph_torch_group_t group) {
    return with(group, [&](GraphGroup& found) { found.launched_by_hand(); });
}

vmmgraph_status_t vmmgraph_torch_verify(vmmgraph_torch_group_t group, uint64_t piece,
                                        const vmmgraph_output_t* outputs, size_t count,
                                        vmmgraph_difference_t* difference) {
    return with(group, [&](GraphGroup& found) {
        auto& to = sized(difference, "difference");
        if (count > 0) {
            static_cast<void>(required(outputs, "outputs"));
        }
        auto result = found.verify(piece, {outputs, outputs + count});
        result.struct_size = to.struct_size;
        to = result;
    });
}

vmmgraph_status_t vmmgraph_torch_drop(vmmgraph_torch_group_t group, uint64_t piece) {
    return with(group, [&](GraphGroup& found) { found.drop(piece, false); });
}

vmmgraph_status_t vmmgraph_torch_keep(vmmgraph_torch_group_t group, uint64_t piece) {
    return with(group, [&](GraphGroup& found) { found.drop(piece, true); });
}

vmmgraph_status_t vmmgraph_torch_set_executable_limits(vmmgraph_arena_t arena, uint64_t max_groups,
                                                       uint64_t max_bytes) {
    return guarded([&] {
        executables_of(arena)->set_limits({static_cast<std::size_t>(max_groups), max_bytes});
    });
}

vmmgraph_status_t vmmgraph_torch_evict_executables(vmmgraph_arena_t arena) {
    return guarded([&] { executables_of(arena)->evict(); });
}

vmmgraph_status_t vmmgraph_torch_executable_stats(vmmgraph_arena_t arena,
                                                  vmmgraph_torch_executables_t* stats) {
    return guarded([&] {
        auto& to = sized(stats, "stats");
        const auto now = executables_of(arena)->stats();
        to = {to.struct_size,
              now.limits.max_graphs,
              now.limits.max_bytes,
              now.graphs,
              now.instantiated,
              now.executables,
              now.nodes,
              now.template_nodes,
              now.bytes,
              now.instantiations,
              now.ahead,
              now.evictions,
              now.hits,
              now.misses};
    });
}
