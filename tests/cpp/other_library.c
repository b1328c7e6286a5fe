/* Stands in for a libvmmgraph.so of another ABI (abi_mismatch_test.cpp). */
#include <vmmgraph/vmmgraph.h>

uint32_t vmmgraph_abi_version(void) { return 12345; }

const char* vmmgraph_version(void) { return "99.0.1"; }
