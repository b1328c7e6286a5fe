# Shared steps of the package tests.
cmake_minimum_required(VERSION 3.24)
include("${SETTINGS}")
set(TESTS_DIR "${CMAKE_CURRENT_LIST_DIR}/..")
set(PREFIX "${WORK}/prefix")
set(STATIC_PREFIX "${WORK}/static-prefix")
# A build without a type has no configuration to name.
set(WITH_CONFIG "")
set(WITH_C "")
set(WITH_BUILD_TYPE "")
if(NOT MULTI_CONFIG)
  set(WITH_BUILD_TYPE "-DCMAKE_BUILD_TYPE=${CONFIG}")
endif()
if(CONFIG)
  set(WITH_CONFIG --config "${CONFIG}")
  set(WITH_C -C "${CONFIG}")
endif()

# Runs a command and fails with it; sets `output`.
macro(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
endmacro()

# Configures a project into an empty folder; sets result and output.
macro(configure source binary)
  file(REMOVE_RECURSE "${binary}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${source}" -B "${binary}" -G "${GENERATOR}" -Werror=dev --no-warn-unused-cli
      "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_C_COMPILER=${C_COMPILER}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}"
      ${WITH_BUILD_TYPE} ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
endmacro()

# Configures without a warning, builds, and runs its tests.
function(build_consumer binary)
  configure("${TESTS_DIR}/consumer" "${binary}" ${ARGN})
  if(NOT result EQUAL 0 OR output MATCHES "CMake Warning")
    message(FATAL_ERROR "configuring failed (${result}):\n${output}")
  endif()
  run("${CMAKE_COMMAND}" --build "${binary}" ${WITH_CONFIG})
  run("${CMAKE_CTEST_COMMAND}" --test-dir "${binary}" ${WITH_C} --output-on-failure --no-tests=error)
  message(STATUS "${output}")
endfunction()

# Installs this build, or only the given components.
function(install_build prefix)
  file(REMOVE_RECURSE "${prefix}")
  set(components "")
  foreach(component IN LISTS ARGN)
    list(APPEND components --component "${component}")
  endforeach()
  run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" ${WITH_CONFIG} --prefix "${prefix}" ${components})
endfunction()

# Fails if a text file below `prefix` names one of the paths.
function(check_no_path prefix)
  file(GLOB_RECURSE files LIST_DIRECTORIES FALSE "${prefix}/*")
  set(looked_at 0)
  foreach(file IN LISTS files)
    if(file MATCHES "\\.(so[.0-9]*|a)$")
      continue()
    endif()
    file(READ "${file}" text)
    math(EXPR looked_at "${looked_at} + 1")
    foreach(path IN LISTS ARGN)
      string(FIND "${text}" "${path}" at)
      if(NOT at EQUAL -1)
        message(SEND_ERROR "${file} names ${path}")
      endif()
    endforeach()
  endforeach()
  if(looked_at LESS 7)
    message(FATAL_ERROR "only ${looked_at} text files in ${prefix}")
  endif()
endfunction()
