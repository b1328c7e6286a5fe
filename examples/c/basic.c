/* One capture through the C interface, on the host driver. */
#include <stdio.h>
#include <string.h>
#include <vmmgraph/vmmgraph.h>

static int failed(vmmgraph_status_t status, const char* call) {
    char message[256];
    if (status == VMMGRAPH_OK) {
        return 0;
    }
    vmmgraph_last_error_message(message, sizeof message, NULL);
    fprintf(stderr, "%s: %s: %s\n", call, vmmgraph_status_name(status), message);
    return 1;
}

#define CHECK(call)              \
    do {                         \
        if (failed(call, #call)) \
            return 1;            \
    } while (0)

/* With CUDA: cudaGraphLaunch(...). */
static void launch(void* user) { memset(user, 42, 1 << 20); }

int main(void) {
    vmmgraph_device_options_t options = {0};
    vmmgraph_arena_stats_t stats = {0};
    vmmgraph_device_t device;
    vmmgraph_arena_t arena;
    vmmgraph_space_t space;
    void *scratch, *output;

    options.struct_size = sizeof options;
    options.driver = VMMGRAPH_DRIVER_HOST;
    CHECK(vmmgraph_device_open(&options, &device));
    CHECK(vmmgraph_arena_create(device, NULL, &arena));

    CHECK(vmmgraph_space_open(arena, &space)); /* with CUDA, the capture begins here */
    CHECK(vmmgraph_space_allocate(space, 8 << 20, NULL, &scratch));
    CHECK(vmmgraph_space_allocate(space, 1 << 20, NULL, &output));
    CHECK(vmmgraph_space_free(space, scratch));
    CHECK(vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT,
                              NULL)); /* and ends here; output is retained */
    CHECK(vmmgraph_space_replay(space, NULL, launch, output));

    stats.struct_size = sizeof stats;
    CHECK(vmmgraph_arena_stats(arena, &stats));
    printf("output[0] = %d, physical %llu MiB\n", *(char*)output,
           (unsigned long long)stats.physical_bytes >> 20);

    CHECK(vmmgraph_space_destroy(space));
    CHECK(vmmgraph_arena_destroy(arena));
    CHECK(vmmgraph_device_close(device));
    return 0;
}
