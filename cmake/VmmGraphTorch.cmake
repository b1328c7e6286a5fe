# The libtorch component: libvmmgraph_torch.so is the core, its cxx bridge and cpp/torch in one library, so that a process never holds
# two copies of the core. A program links it in place of libvmmgraph.so.
#
#   VMMGRAPH_TORCH_ROOT   the folder of a pip torch (…/site-packages/torch); default: where python3 finds it
#
# No CUDA toolkit is needed: headers come from the pip packages nvidia-cuda-runtime and nvidia-cuda-crt beside torch, or from
# CUDA_HOME; torch's libraries are linked by path.

set(VMMGRAPH_TORCH_ROOT "" CACHE PATH "The folder of a pip torch")
if(NOT VMMGRAPH_TORCH_ROOT)
  execute_process(
    COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(VMMGRAPH_TORCH_ROOT "${_found}" CACHE PATH "The folder of a pip torch" FORCE)
endif()
if(NOT EXISTS "${VMMGRAPH_TORCH_ROOT}/include/c10/cuda/CUDACachingAllocator.h")
  message(FATAL_ERROR "VMMGRAPH_TORCH=ON, but there is no CUDA torch at VMMGRAPH_TORCH_ROOT='${VMMGRAPH_TORCH_ROOT}'")
endif()
find_path(VMMGRAPH_CUDA_INCLUDE cuda_runtime_api.h
  HINTS "${VMMGRAPH_TORCH_ROOT}/../nvidia/cu13/include" "${VMMGRAPH_TORCH_ROOT}/../nvidia/cuda_runtime/include" "$ENV{CUDA_HOME}/include"
  PATHS /usr/local/cuda/include REQUIRED)

vmmgraph_cargo_archive(vmmgraph_torch_archive "${PROJECT_BINARY_DIR}/cargo-torch" "${VMMGRAPH_PREBUILT_TORCH_ARCHIVE}" --features bridge)

# Torch's headers and libraries, for the shim and for tests; not installed.
add_library(vmmgraph_libtorch INTERFACE)
target_include_directories(vmmgraph_libtorch SYSTEM INTERFACE
  "${VMMGRAPH_TORCH_ROOT}/include" "${VMMGRAPH_TORCH_ROOT}/include/torch/csrc/api/include" "${VMMGRAPH_CUDA_INCLUDE}")
foreach(_lib c10 c10_cuda torch_cpu torch_cuda)
  target_link_libraries(vmmgraph_libtorch INTERFACE "${VMMGRAPH_TORCH_ROOT}/lib/lib${_lib}.so")
endforeach()
# Wheels have no unversioned libcudart.so to link with.
find_file(VMMGRAPH_CUDART NAMES libcudart.so.13 libcudart.so.12 libcudart.so
  HINTS "${VMMGRAPH_CUDA_INCLUDE}/../lib" "${VMMGRAPH_CUDA_INCLUDE}/../lib64" REQUIRED)
target_link_libraries(vmmgraph_libtorch INTERFACE "${VMMGRAPH_CUDART}")
# torch_cuda registers its operators when it is loaded, which nothing here refers to; what it needs itself (cuBLAS, cuDNN, …) is
# found when a program runs.
target_link_options(vmmgraph_libtorch INTERFACE LINKER:--no-as-needed LINKER:--allow-shlib-undefined)
target_compile_features(vmmgraph_libtorch INTERFACE cxx_std_20)

set(_torch_map "${PROJECT_SOURCE_DIR}/cmake/vmmgraph_torch.map")
add_library(vmmgraph_torch SHARED
  cpp/torch/block_allocator.cpp cpp/torch/capture.cpp cpp/torch/guards.cpp cpp/torch/registry.cpp cpp/torch/segments.cpp cpp/torch/workspace.cpp)
add_library(VmmGraph::torch ALIAS vmmgraph_torch)
add_dependencies(vmmgraph_torch vmmgraph_torch_archive)
target_include_directories(vmmgraph_torch
  PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
  PRIVATE "${vmmgraph_torch_archive_DIR}/cxxbridge")
target_compile_options(vmmgraph_torch PRIVATE -Wall -Wextra -Werror)
target_link_libraries(vmmgraph_torch PRIVATE vmmgraph_libtorch
  "$<LINK_LIBRARY:WHOLE_ARCHIVE,${vmmgraph_torch_archive_PATH}>" ${VMMGRAPH_NATIVE_STATIC_LIBS_LIST})
target_link_options(vmmgraph_torch PRIVATE
  "LINKER:--version-script=${_torch_map}" LINKER:--gc-sections LINKER:-z,nodelete,-z,now,-z,relro)
set_target_properties(vmmgraph_torch PROPERTIES
  VERSION "${PROJECT_VERSION}"
  SOVERSION "${_soversion}"
  LINK_DEPENDS "${_torch_map};${vmmgraph_torch_archive_PATH}"
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  BUILD_WITH_INSTALL_RPATH ON
  INSTALL_RPATH "$ORIGIN"
  INTERFACE_VMMGRAPH_FLAVOUR torch
  COMPATIBLE_INTERFACE_STRING VMMGRAPH_FLAVOUR
  EXPORT_NAME torch)
