// Replaces the driver library: the first CUDA call loads it.
#define _GNU_SOURCE
#include <stdlib.h>

__attribute__((constructor)) static void loaded(void) {
    setenv("NAMED_LIBCUDA_WAS_LOADED", "1", 1);
}
