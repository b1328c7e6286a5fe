# Builds examples against the installed package and a pip torch, each with its own CMakeLists.txt and
# without a CUDA toolkit.
cmake_minimum_required(VERSION 3.24)
foreach(example IN LISTS EXAMPLES)
  set(binary "${WORK}/example-${example}")
  file(REMOVE_RECURSE "${binary}")
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}/examples/${example}" -B "${binary}" -G "${GENERATOR}"
      "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DCMAKE_BUILD_TYPE=Debug
      -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
      "-DCMAKE_PREFIX_PATH=${WORK}/prefix" "-DVMMGRAPH_TORCH_ROOT=${TORCH_ROOT}"
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${binary}" COMMAND_ERROR_IS_FATAL ANY)
endforeach()
