#include "captures.hpp"

#include <set>

#include "forks.hpp"

namespace vmmgraph::memory_saver {

namespace {

struct Known {
    std::shared_mutex gate;
    std::set<void*> captured;
    std::set<void*> watched;
};

// Never destroyed: memory may be freed after all static objects of the program are destroyed.
Known& known() {
    static Known& known = *new Known;
    return known;
}

bool is_capturing(const Runtime& runtime, void* stream) noexcept {
    int status = 0;
    if (runtime.stream_is_capturing(stream, &status) != 0) {
        static_cast<void>(runtime.get_last_error());
        return false;
    }
    return status != 0;
}

}  // namespace

NoneBegins::NoneBegins() : lock_(known().gate) {}

bool NoneBegins::capturing(const Runtime& runtime) const noexcept {
    if (!known().captured.empty()) {
        return true;
    }
    for (void* const stream : known().watched) {
        if (is_capturing(runtime, stream)) {
            return true;
        }
    }
    return false;
}

int begin_capture(const Runtime& runtime, void* stream,
                  const std::function<int(const Runtime&)>& begin) {
    if (in_child()) {
        // CUDA refuses the call in a forked child, and no thread may be left to release the gate.
        return begin(runtime);
    }
    const std::unique_lock lock(known().gate);
    const bool added = known().captured.insert(stream).second;
    const int code = begin(runtime);
    if (code != 0 && added) {
        known().captured.erase(stream);
    }
    return code;
}

int end_capture(const Runtime& runtime, void* stream, void** graph) {
    const int code = runtime.stream_end_capture(stream, graph);
    // After a failure the capture may continue on a different thread. The query clears no error of
    // the program.
    if (!in_child() && (code == 0 || !is_capturing(runtime, stream))) {
        const std::unique_lock lock(known().gate);
        known().captured.erase(stream);
    }
    return code;
}

void watch_streams(void* const* streams, std::size_t count) {
    const std::unique_lock lock(known().gate);
    known().watched.insert(streams, streams + count);
}

}  // namespace vmmgraph::memory_saver
