# Builds the Rust core as a static archive.
#
# Defines the target vmmgraph_archive, which builds the archive, and sets
#   VMMGRAPH_ARCHIVE              the archive's path (with generator expressions)
#   VMMGRAPH_NATIVE_STATIC_LIBS   system libraries needed by programs that link the archive
#
# VMMGRAPH_PREBUILT_ARCHIVE=<path> uses an existing archive; no Rust is needed then.

set(VMMGRAPH_PREBUILT_ARCHIVE "" CACHE FILEPATH "Take this libvmmgraph.a instead of calling cargo")
option(VMMGRAPH_CARGO_OFFLINE "Keep cargo from using the network" OFF)
set(VMMGRAPH_CARGO_FLAGS "" CACHE STRING "More arguments for cargo rustc")

find_program(VMMGRAPH_CARGO cargo DOC "cargo, which builds the Rust core")
find_program(VMMGRAPH_RUSTC rustc DOC "rustc, which names the system libraries of a Rust archive")
mark_as_advanced(VMMGRAPH_CARGO VMMGRAPH_RUSTC VMMGRAPH_CARGO_FLAGS)

# vmmgraph_cargo_archive(<target> <cargo's target folder> <prebuilt archive or ""> [more arguments
# for cargo])
#
# Sets <target>_PATH to the archive and <target>_DIR to the folder with the bridge's headers in
# cxxbridge. A prebuilt archive has cxxbridge in its own folder or the parent folder, as in cargo's
# layout.
function(vmmgraph_cargo_archive target target_dir prebuilt)
  if(prebuilt)
    get_filename_component(_archive "${prebuilt}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
    if(NOT EXISTS "${_archive}")
      message(FATAL_ERROR "${prebuilt}: there is no such archive")
    endif()
    get_filename_component(target_dir "${_archive}" DIRECTORY)
    if(NOT EXISTS "${target_dir}/cxxbridge" AND EXISTS "${target_dir}/../cxxbridge")
      get_filename_component(target_dir "${target_dir}/.." ABSOLUTE)
    endif()
    add_custom_target(${target})
  else()
    if(NOT VMMGRAPH_CARGO)
      message(FATAL_ERROR "VmmGraph's core is Rust, and cargo was not found. "
        "Set VMMGRAPH_CARGO, or VMMGRAPH_PREBUILT_ARCHIVE to a libvmmgraph.a that was built elsewhere.")
    endif()
    set(_out_dir "${target_dir}/$<IF:$<CONFIG:Debug>,debug,release>")
    set(_archive "${_out_dir}/libvmmgraph.a")
    separate_arguments(_flags UNIX_COMMAND "${VMMGRAPH_CARGO_FLAGS}")
    if(VMMGRAPH_CARGO_OFFLINE)
      list(APPEND _flags --offline)
    endif()
    # Unset CC and CXX for cargo: CMake may have set them for a cross compiler.
    add_custom_command(
      OUTPUT "${_archive}"
      COMMAND "${CMAKE_COMMAND}" -E env --unset=CC --unset=CXX --unset=CFLAGS --unset=CXXFLAGS
        "CARGO_TARGET_DIR=${target_dir}"
        "${VMMGRAPH_CARGO}" rustc --locked --package vmmgraph --lib --crate-type staticlib
        "--profile=$<IF:$<CONFIG:Debug>,dev,release>" ${ARGN} ${_flags}
      DEPENDS "${PROJECT_SOURCE_DIR}/Cargo.toml" "${PROJECT_SOURCE_DIR}/Cargo.lock"
      DEPFILE "${_out_dir}/libvmmgraph.d"
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
      COMMENT "Building the Rust core (${target})"
      USES_TERMINAL
      COMMAND_EXPAND_LISTS
      VERBATIM)
    add_custom_target(${target} DEPENDS "${_archive}")
  endif()
  set(${target}_PATH "${_archive}" PARENT_SCOPE)
  set(${target}_DIR "${target_dir}" PARENT_SCOPE)
endfunction()

vmmgraph_cargo_archive(vmmgraph_archive "${PROJECT_BINARY_DIR}/cargo" "${VMMGRAPH_PREBUILT_ARCHIVE}")
set(VMMGRAPH_ARCHIVE "${vmmgraph_archive_PATH}")

if(NOT DEFINED CACHE{VMMGRAPH_NATIVE_STATIC_LIBS})
  # The output of rustc 1.95 on Linux; queried below if rustc exists.
  set(_libs "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc")
  if(VMMGRAPH_RUSTC)
    execute_process(
      COMMAND "${VMMGRAPH_RUSTC}" --crate-name empty --crate-type staticlib --print native-static-libs
        -o "${CMAKE_CURRENT_BINARY_DIR}/libempty.a" -
      INPUT_FILE /dev/null
      RESULT_VARIABLE _result
      OUTPUT_VARIABLE _output
      ERROR_VARIABLE _output)
    file(REMOVE "${CMAKE_CURRENT_BINARY_DIR}/libempty.a")
    if(_result EQUAL 0 AND _output MATCHES "native-static-libs: ([^\n]+)")
      string(STRIP "${CMAKE_MATCH_1}" _libs)
    endif()
  endif()
  set(VMMGRAPH_NATIVE_STATIC_LIBS "${_libs}" CACHE STRING "System libraries that a program with libvmmgraph.a needs")
  mark_as_advanced(VMMGRAPH_NATIVE_STATIC_LIBS)
endif()
