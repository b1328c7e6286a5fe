/* C program with the memory saver alone. */
#include <string.h>
#include <vmmgraph/memory_saver.h>

int main(void) {
    tms_set_current_tag("weights");
    if (strcmp(tms_get_current_tag(), "weights") != 0 || tms_pause("weights") != 0 ||
        tms_resume(NULL) != 0) {
        return 1;
    }
    return tms_torch_malloc(1, 0, NULL) == NULL && tms_last_error(NULL) == 401 ? 0 : 2;
}
