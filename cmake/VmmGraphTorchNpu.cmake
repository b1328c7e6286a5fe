# libvmmgraph_torch_npu.so: captures of torch_npu's graphs in spaces (cpp/torch_npu), over
# libvmmgraph.so. Compiled for the torch_npu in VMMGRAPH_TORCH_NPU_ROOT; builds without CANN.
# Depends only on libascendcl.so of CANN's libraries, in the version of the process.
set(VMMGRAPH_TORCH_NPU_ROOT "" CACHE PATH "The folder that has torch and torch_npu as Python packages")
set(_torch "${VMMGRAPH_TORCH_NPU_ROOT}/torch")
set(_torch_npu "${VMMGRAPH_TORCH_NPU_ROOT}/torch_npu")
if(NOT EXISTS "${_torch_npu}/version.py" OR NOT EXISTS "${_torch}/lib/libc10.so")
  message(FATAL_ERROR "VMMGRAPH_TORCH_NPU_ROOT=${VMMGRAPH_TORCH_NPU_ROOT}: there is no torch with torch_npu (scripts/torch_npu.sh fetches them)")
endif()
file(STRINGS "${_torch_npu}/version.py" _version REGEX "__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" _version "${_version}")
# The allocator differs in every release, and cpp/torch_npu/allocator.cpp overrides all of its
# functions.
if(NOT _version VERSION_EQUAL 2.14.0)
  message(FATAL_ERROR "VMMGRAPH_TORCH_NPU_ROOT has torch_npu ${_version}: VmmGraph::torch_npu is for 2.14.0")
endif()

add_library(vmmgraph_torch_npu_wheels INTERFACE)
target_include_directories(vmmgraph_torch_npu_wheels SYSTEM INTERFACE "${_torch}/include" "${_torch}/include/torch/csrc/api/include" "${_torch_npu}/include"
  "${_torch_npu}/include/third_party/acl/inc" "${_torch_npu}/include/third_party/hccl/inc")
target_link_libraries(vmmgraph_torch_npu_wheels INTERFACE
  "${_torch_npu}/lib/libtorch_npu.so" "${_torch}/lib/libtorch_cpu.so" "${_torch}/lib/libc10.so")

set(_npu_map "${PROJECT_SOURCE_DIR}/cmake/vmmgraph_torch_npu.map")
add_library(vmmgraph_torch_npu SHARED
  cpp/torch_npu/allocator.cpp cpp/torch_npu/blocks.cpp cpp/torch_npu/capture.cpp cpp/torch_npu/hidden.cpp)
add_library(VmmGraph::torch_npu ALIAS vmmgraph_torch_npu)
target_link_libraries(vmmgraph_torch_npu PUBLIC vmmgraph PRIVATE "$<BUILD_INTERFACE:vmmgraph_torch_npu_wheels>")
target_compile_definitions(vmmgraph_torch_npu PRIVATE "VMMGRAPH_TORCH_NPU_VERSION=\"${_version}\"")
target_compile_options(vmmgraph_torch_npu PRIVATE -Wall -Wextra $<$<BOOL:${VMMGRAPH_WERROR}>:-Werror>)
target_link_options(vmmgraph_torch_npu PRIVATE "LINKER:--version-script=${_npu_map}" LINKER:-z,nodelete,-z,now,-z,relro)
set_target_properties(vmmgraph_torch_npu PROPERTIES
  ${_versions}
  CXX_STANDARD 20
  CXX_STANDARD_REQUIRED ON
  CXX_EXTENSIONS OFF
  LINK_DEPENDS "${_npu_map}"
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  INSTALL_RPATH "$ORIGIN"
  EXPORT_NAME torch_npu)
