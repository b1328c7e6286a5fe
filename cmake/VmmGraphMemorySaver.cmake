# libvmmgraph_memory_saver.so: torch_memory_saver's C functions on the core's regions. A separate
# library because it replaces cudaMalloc and cudaFree. Builds without CUDA. Unversioned, since
# LD_PRELOAD names the file. Opens the core at run time: the one in the process, else libvmmgraph.so
# in its own folder, or in ../_lib for the copies in a wheel.
set(_saver_map "${PROJECT_SOURCE_DIR}/cmake/vmmgraph_memory_saver.map")
add_library(vmmgraph_memory_saver SHARED
  cpp/memory_saver/blocks.cpp cpp/memory_saver/captures.cpp cpp/memory_saver/core.cpp cpp/memory_saver/entrypoints.cpp cpp/memory_saver/errors.cpp cpp/memory_saver/files.cpp cpp/memory_saver/forks.cpp
  cpp/memory_saver/runtime.cpp cpp/memory_saver/saver.cpp cpp/memory_saver/settings.cpp)
add_library(VmmGraph::memory_saver ALIAS vmmgraph_memory_saver)
add_dependencies(vmmgraph_memory_saver vmmgraph)
# By name: before glibc 2.34 pthread is a separate library, whatever CMake finds on this machine.
target_link_libraries(vmmgraph_memory_saver PRIVATE ${CMAKE_DL_LIBS} pthread)
target_compile_definitions(vmmgraph_memory_saver PRIVATE "VMMGRAPH_CORE_FILE=\"$<TARGET_SONAME_FILE_NAME:vmmgraph>\"")
target_include_directories(vmmgraph_memory_saver PRIVATE "${PROJECT_SOURCE_DIR}/include" INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_compile_options(vmmgraph_memory_saver PRIVATE -Wall -Wextra $<$<BOOL:${VMMGRAPH_WERROR}>:-Werror>)
target_link_options(vmmgraph_memory_saver PRIVATE
  "LINKER:--version-script=${_saver_map}" LINKER:--no-undefined
  # Threads and blocks may outlive a dlclose.
  LINKER:-z,nodelete,-z,now,-z,relro)
set_target_properties(vmmgraph_memory_saver PROPERTIES
  CXX_STANDARD 17
  CXX_STANDARD_REQUIRED ON
  CXX_EXTENSIONS OFF
  LINK_DEPENDS "${_saver_map}"
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  BUILD_RPATH "$ORIGIN"
  INSTALL_RPATH "$ORIGIN"
  EXPORT_NAME memory_saver)
