# The libtorch component: libvmmgraph_torch.so contains the core, its cxx bridge and cpp/torch, so a
# process never has two copies of the core. Link it in place of libvmmgraph.so.
include("${CMAKE_CURRENT_LIST_DIR}/VmmGraphLibtorch.cmake")

vmmgraph_cargo_archive(vmmgraph_torch_archive vmmgraph-bridge "${VMMGRAPH_PREBUILT_TORCH_ARCHIVE}")

# Turn off for relocatable packages: programs must then load torch's libraries or make them
# findable.
option(VMMGRAPH_TORCH_RPATH "The installed libvmmgraph_torch names the folders of the torch it was built with" ON)
set(_torch_rpath "$ORIGIN")
if(VMMGRAPH_TORCH_RPATH)
  list(APPEND _torch_rpath ${VMMGRAPH_TORCH_FOLDERS})
endif()

set(_torch_map "${PROJECT_SOURCE_DIR}/cmake/vmmgraph_torch.map")
add_library(vmmgraph_torch SHARED
  cpp/torch/block_allocator.cpp cpp/torch/capture.cpp cpp/torch/collectives.cpp cpp/torch/eager_scope.cpp cpp/torch/executables.cpp cpp/torch/guards.cpp cpp/torch/kv_cache.cpp cpp/torch/memsets.cpp cpp/torch/one_core.cpp
  cpp/torch/region_scope.cpp cpp/torch/registry.cpp
  cpp/torch/segments.cpp cpp/torch/session.cpp cpp/torch/graph_group.cpp cpp/torch/short_of_memory.cpp cpp/torch/torch_c.cpp cpp/torch/torchs_pool.cpp cpp/torch/instantiator.cpp cpp/torch/workspace.cpp
  cpp/engine/ahead.cpp cpp/engine/behind.cpp cpp/engine/declare.cpp cpp/engine/device_writes.cpp cpp/engine/executor.cpp
  cpp/engine/executor_behind.cpp cpp/engine/executor_state.cpp
  cpp/engine/graph_inputs.cpp cpp/engine/histogram.cpp cpp/engine/inputs_state.cpp cpp/engine/recorder.cpp
  cpp/engine/staging.cpp cpp/engine/stream_order.cpp cpp/engine/work_thread.cpp)
add_library(VmmGraph::torch ALIAS vmmgraph_torch)
add_dependencies(vmmgraph_torch vmmgraph_torch_archive)
target_include_directories(vmmgraph_torch
  PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
  PRIVATE "${vmmgraph_torch_archive_DIR}/cxxbridge")
target_compile_options(vmmgraph_torch PRIVATE -Wall -Wextra $<$<BOOL:${VMMGRAPH_WERROR}>:-Werror>)
# Saves time for builds of many releases without a compiler cache: torch's headers dominate the
# compile time.
option(VMMGRAPH_TORCH_PRECOMPILE "Read torch's headers once" OFF)
# For CI, which has just compiled these sources for the same torch: only the link differs.
set(VMMGRAPH_TORCH_OBJECTS "" CACHE PATH "Take the objects of this build folder instead of compiling")
if(VMMGRAPH_TORCH_OBJECTS)
  load_cache("${VMMGRAPH_TORCH_OBJECTS}" READ_WITH_PREFIX _built_ CMAKE_UNITY_BUILD)
  if(_built_CMAKE_UNITY_BUILD)
    set(_sources Unity/unity_0_cxx.cxx)
  else()
    get_target_property(_sources vmmgraph_torch SOURCES)
  endif()
  list(TRANSFORM _sources REPLACE "(.+)" "${VMMGRAPH_TORCH_OBJECTS}/CMakeFiles/vmmgraph_torch.dir/\\1.o")
  set_target_properties(vmmgraph_torch PROPERTIES SOURCES "${_sources}" LINKER_LANGUAGE CXX)
elseif(VMMGRAPH_TORCH_PRECOMPILE)
  target_precompile_headers(vmmgraph_torch PRIVATE <ATen/core/Tensor.h> <ATen/cuda/CUDAGraph.h> <c10/cuda/CUDACachingAllocator.h>
    <c10/cuda/CUDAGuard.h> <torch/csrc/cuda/CUDAPluggableAllocator.h>)
endif()
target_link_libraries(vmmgraph_torch PRIVATE vmmgraph_libtorch
  "$<LINK_LIBRARY:WHOLE_ARCHIVE,${vmmgraph_torch_archive_PATH}>" ${VMMGRAPH_NATIVE_STATIC_LIBS_LIST})
target_link_options(vmmgraph_torch PRIVATE
  "LINKER:--version-script=${_torch_map}" LINKER:--gc-sections LINKER:-z,nodelete,-z,now,-z,relro)
set_target_properties(vmmgraph_torch PROPERTIES
  ${_versions}
  LINK_DEPENDS "${_torch_map};${vmmgraph_torch_archive_PATH}"
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  # Includes torch's folders: a program's own path does not apply to this library's dependencies,
  # and find_package(Torch) leaves as-needed on, so a program may not load libc10.so itself.
  # LD_LIBRARY_PATH has precedence.
  BUILD_RPATH "$ORIGIN;${VMMGRAPH_TORCH_FOLDERS}"
  INSTALL_RPATH "${_torch_rpath}"
  INTERFACE_VMMGRAPH_FLAVOUR torch
  COMPATIBLE_INTERFACE_STRING VMMGRAPH_FLAVOUR
  EXPORT_NAME torch)
