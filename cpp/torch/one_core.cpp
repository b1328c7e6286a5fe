#include <dlfcn.h>
#include <vmmgraph/torch.hpp>

#include "guards.hpp"

namespace vmmgraph::torch {
namespace {

const char here = 0;

Dl_info library_of(const void* address) {
    Dl_info info{};
    static_cast<void>(dladdr(address, &info));
    return info;
}

// Returns the path of a second library with vmmgraph.h functions, found before or after this one;
// empty if none.
std::string other_core() {
    const auto ours = library_of(&here);
    for (void* const scope : {RTLD_DEFAULT, RTLD_NEXT}) {
        if (const void* const function = dlsym(scope, "vmmgraph_abi_version")) {
            const auto found = library_of(function);
            if (found.dli_fbase != ours.dli_fbase) {
                return found.dli_fname == nullptr ? "the program itself" : found.dli_fname;
            }
        }
    }
    return {};
}

}  // namespace

void require_one_core() {
    static const std::string other = other_core();
    if (!other.empty()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot use " + std::string(library_of(&here).dli_fname) +
                   ": a second copy of the core is loaded, " + other +
                   "; link VmmGraph::torch everywhere in place of VmmGraph::vmmgraph");
    }
}

}  // namespace vmmgraph::torch
