"""run.py TEST-LIBRARY...: runs a test of the torch_npu component in a Python process, because
libtorch_npu.so needs an interpreter.

torch_npu calls its Python package when it starts a device; a stub package accepts the call.
"""

import ctypes
import os
import sys
import types

npu = types.ModuleType("torch_npu.npu")
npu._lazy_init = lambda: None
for name in ("torch", "torch_npu"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].npu = npu
    sys.modules[name].__file__ = __file__
    sys.modules[f"{name}.npu"] = npu

ctypes.CDLL("libtorch_npu.so", ctypes.RTLD_GLOBAL)
arguments = [argument.encode() for argument in sys.argv[1:]]
library = ctypes.CDLL(sys.argv[1])
code = library.run(len(arguments), (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None))
sys.stdout.flush()
# Skips destructors: torch_npu and the interpreter depend on their order.
os._exit(code)
