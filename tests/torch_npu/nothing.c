// Functions without effect, called while torch_npu's and torch's libraries load. All other missing
// functions abort with their name (tests/torch/standins.py).

#include <stdint.h>

// Of libacl_op_compiler.so, where torch_npu looks up all of these.
int aclSetCompileopt(int option, const char* value) {
    (void)option;
    (void)value;
    return 0;
}

int aclrtGetSysParamOpt(int option, int64_t* value) {
    (void)option;
    *value = 0;
    return 0;
}

int aclrtSetSysParamOpt(int option, int64_t value) {
    (void)option;
    (void)value;
    return 0;
}

// c10d::get_gil_checker() of libtorch_cuda.so, where torch's Python library stores a function.
void* _ZN4c10d15get_gil_checkerEv(void) {
    static void* checker;
    return &checker;
}
