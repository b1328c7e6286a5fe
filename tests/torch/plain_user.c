// A library that uses the plain core and says so to nobody.
#include <vmmgraph/vmmgraph.h>

const char* plain_user_version(void);
const char* plain_user_version(void) { return vmmgraph_version(); }
