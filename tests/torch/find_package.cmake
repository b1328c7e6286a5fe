# Installs VmmGraph with find_package(Torch), which needs a toolkit (toolkit.sh). One engine finds
# both packages in either order; another builds VmmGraph as a subproject. Needs no GPU: torch's
# libraries load with stand-ins.
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE "${WORK}")
execute_process(COMMAND "${CMAKE_CURRENT_LIST_DIR}/toolkit.sh" "${TORCH_ROOT}"
  OUTPUT_VARIABLE toolkit OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(standins "${toolkit}/lib/standins:${toolkit}/lib")

# A prebuilt archive has the bridge's headers next to it; cargo's are links.
file(MAKE_DIRECTORY "${WORK}/core")
configure_file("${TORCH_ARCHIVE}" "${WORK}/core/libvmmgraph.a" COPYONLY)
file(GLOB_RECURSE headers RELATIVE "${BRIDGE}" FOLLOW_SYMLINKS "${BRIDGE}/*.h")
foreach(header IN LISTS headers)
  configure_file("${BRIDGE}/${header}" "${WORK}/core/cxxbridge/${header}" COPYONLY)
endforeach()
set(core "-DVMMGRAPH_PREBUILT_ARCHIVE=${ARCHIVE}" "-DVMMGRAPH_PREBUILT_TORCH_ARCHIVE=${WORK}/core/libvmmgraph.a")

function(build source binary)
  foreach(step configure build)
    if(step STREQUAL "configure")
      set(command -S "${source}" -B "${binary}" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
        "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DCMAKE_BUILD_TYPE=Debug
        # Parsing torch's headers dominates compilation.
        -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=14 -DVMMGRAPH_MEMORY_SAVER=OFF "-DCMAKE_PREFIX_PATH=${WORK}/prefix\;${TORCH_ROOT}"
        "-DCUDA_TOOLKIT_ROOT_DIR=${toolkit}" "-DCMAKE_CUDA_COMPILER=${toolkit}/bin/nvcc" "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,${standins}"
        ${ARGN})
    else()
      set(command --build "${binary}")
    endif()
    execute_process(COMMAND "${CMAKE_COMMAND}" -E env TORCH_CUDA_ARCH_LIST=9.0 "${CMAKE_COMMAND}" ${command}
      RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
      message(FATAL_ERROR "${step} of ${source} (${ARGN}) failed:\n${output}")
    endif()
  endforeach()
endfunction()

function(runs_with folder)
  foreach(program engine_targets engine_libraries)
    execute_process(COMMAND "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${standins}" "${folder}/${program}" COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endfunction()

build("${SOURCE}" "${WORK}/vmmgraph" -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_FIND=ON -DVMMGRAPH_TESTS=OFF -DVMMGRAPH_EXAMPLES=OFF ${core})
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/vmmgraph" --prefix "${WORK}/prefix" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
set(engine "${CMAKE_CURRENT_LIST_DIR}/consumer_find_package")
foreach(first ON OFF)
  build("${engine}" "${WORK}/torch_first_${first}" "-DTORCH_FIRST=${first}")
  runs_with("${WORK}/torch_first_${first}")
endforeach()
build("${engine}" "${WORK}/subdirectory" "-DVMMGRAPH_SOURCE=${SOURCE}" ${core})
runs_with("${WORK}/subdirectory")
