// A library that uses the plain core.
#include <vmmgraph/vmmgraph.h>

const char* plain_user_version(void);
const char* plain_user_version(void) { return vmmgraph_version(); }
