// Lock of the library's tables, and detection of forked children.
#pragma once

#include <mutex>

namespace vmmgraph::memory_saver {

// Held during table look-ups, never during calls with possible callbacks. fork() waits for this
// lock, so no child inherits a locked mutex.
std::mutex& tables() noexcept;

// Marks regions as used: children forked later cannot use regions.
void note_use() noexcept;

// True in such a child, where the library's memory does not work.
bool in_child() noexcept;

}  // namespace vmmgraph::memory_saver
