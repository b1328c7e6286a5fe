/* Independent C program: checks the version and uses a block. */
#include <stdio.h>
#include <string.h>
#include <vmmgraph/vmmgraph.h>

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

int main(void) {
    const char* header = TEXT(VMMGRAPH_VERSION_MAJOR) "." TEXT(VMMGRAPH_VERSION_MINOR) "." TEXT(
        VMMGRAPH_VERSION_PATCH);
    vmmgraph_device_options_t options;
    vmmgraph_device_t device = NULL;
    vmmgraph_arena_t arena = NULL;
    void* block = NULL;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.driver = VMMGRAPH_DRIVER_HOST;

    printf("cmake %s, header %s, library %s\n", CMAKE_SAYS, header, vmmgraph_version());
    if (strcmp(CMAKE_SAYS, header) != 0 || strcmp(header, vmmgraph_version()) != 0) {
        return 2;
    }
    if (vmmgraph_device_open(&options, &device) != VMMGRAPH_OK ||
        vmmgraph_arena_create(device, NULL, &arena) != VMMGRAPH_OK ||
        vmmgraph_arena_allocate(arena, 1000, NULL, &block) != VMMGRAPH_OK) {
        return 3;
    }
    memset(block, 1, 1000);
    if (vmmgraph_arena_destroy(arena) != VMMGRAPH_OK ||
        vmmgraph_device_close(device) != VMMGRAPH_OK) {
        return 4;
    }
    return 0;
}
