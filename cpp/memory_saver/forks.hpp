// The lock of the library's tables, and children made by fork.
#pragma once

#include <mutex>

namespace vmmgraph::memory_saver {

// Held for a look into a table, never while VmmGraph or the runtime is called that may call back. A fork waits for it, so that no child
// finds it held by a thread it does not have.
std::mutex& tables() noexcept;

// Regions are used from now on: a child made after this has none.
void note_use() noexcept;

// Whether this is such a child. Nothing of the library's memory works there.
bool in_child() noexcept;

}  // namespace vmmgraph::memory_saver
