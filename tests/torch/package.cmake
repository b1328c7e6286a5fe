# The installed component links a program independent of torch, and is refused next to the plain
# library.
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE "${WORK}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${WORK}/prefix"
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(WRITE "${WORK}/consumer/main.cpp" [[
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_c.h>
int main(int argc, char**) { return argc > 100 ? vmmgraph::torch::built_for()[0] + vmmgraph_torch_installed() : 0; }
]])
file(WRITE "${WORK}/consumer/CMakeLists.txt" [[
cmake_minimum_required(VERSION 3.16)
project(Consumer LANGUAGES CXX)
find_package(VmmGraph REQUIRED COMPONENTS torch)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE VmmGraph::torch)
# Torch's own dependencies are resolved at run time.
target_link_options(consumer PRIVATE -Wl,--unresolved-symbols=ignore-in-shared-libs)
set_target_properties(consumer PROPERTIES CXX_STANDARD 17)
if(BOTH)
  target_link_libraries(consumer PRIVATE VmmGraph::vmmgraph)
endif()
]])
macro(configure)
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${WORK}/consumer" -B "${WORK}/build" -G "${GENERATOR}"
      "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_PREFIX_PATH=${WORK}/prefix" ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
endmacro()
configure()
if(NOT result EQUAL 0)
  message(FATAL_ERROR "configuring failed:\n${output}")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${WORK}/build" COMMAND_ERROR_IS_FATAL ANY)
configure(-DBOTH=ON)
if(result EQUAL 0 OR NOT output MATCHES "VMMGRAPH_FLAVOUR")
  message(FATAL_ERROR "both flavours were accepted, or refused for another reason:\n${output}")
endif()
