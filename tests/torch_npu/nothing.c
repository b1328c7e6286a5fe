// What torch_npu's libraries call of CANN's compiler of operators, and torch's of CUDA, when they are loaded and started: taken, and without effect. The
// rest of what they need and is not here ends the process with its name (tests/torch/standins.py).

#include <stdint.h>

// Of libacl_op_compiler.so, where torch_npu looks for all of these.
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

// c10d::get_gil_checker() of libtorch_cuda.so: where torch's Python library leaves a function.
void* _ZN4c10d15get_gil_checkerEv(void) {
    static void* checker;
    return &checker;
}
