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
set(VMMGRAPH_CARGO_TARGET_DIR "${PROJECT_BINARY_DIR}/cargo" CACHE PATH "cargo's target folder, shared by all cargo builds")

find_program(VMMGRAPH_CARGO cargo DOC "cargo, which builds the Rust core")
find_program(VMMGRAPH_RUSTC rustc DOC "rustc, which names the system libraries of a Rust archive")
mark_as_advanced(VMMGRAPH_CARGO VMMGRAPH_RUSTC VMMGRAPH_CARGO_FLAGS VMMGRAPH_CARGO_TARGET_DIR)

# vmmgraph_cargo(<target> <file> <package> [more arguments for cargo])
#
# Defines a target which builds <file> of a package, and sets <target>_PATH to it. Always runs cargo,
# which detects changes.
function(vmmgraph_cargo target file package)
  if(NOT VMMGRAPH_CARGO)
    message(FATAL_ERROR "VmmGraph's core is Rust, and cargo was not found. "
      "Set VMMGRAPH_CARGO, or VMMGRAPH_PREBUILT_ARCHIVE to a libvmmgraph.a that was built elsewhere.")
  endif()
  separate_arguments(_flags UNIX_COMMAND "${VMMGRAPH_CARGO_FLAGS}")
  if(VMMGRAPH_CARGO_OFFLINE)
    list(APPEND _flags --offline)
  endif()
  set(_path "${VMMGRAPH_CARGO_TARGET_DIR}/$<IF:$<CONFIG:Debug>,debug,release>/${file}")
  # Unset CC and CXX for cargo: CMake may have set them for a cross compiler.
  add_custom_target(${target} ALL
    COMMAND "${CMAKE_COMMAND}" -E env --unset=CC --unset=CXX --unset=CFLAGS --unset=CXXFLAGS
      "CARGO_TARGET_DIR=${VMMGRAPH_CARGO_TARGET_DIR}"
      "${VMMGRAPH_CARGO}" rustc --locked --package ${package} "--profile=$<IF:$<CONFIG:Debug>,dev,release>" ${_flags} ${ARGN}
    BYPRODUCTS "${_path}"
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    COMMENT "Building ${package}"
    USES_TERMINAL
    COMMAND_EXPAND_LISTS
    VERBATIM)
  set(${target}_PATH "${_path}" PARENT_SCOPE)
endfunction()

# vmmgraph_cargo_archive(<target> <package> <prebuilt archive or "">)
#
# Sets <target>_PATH to a package's archive and <target>_DIR to the folder with the bridge's headers
# in cxxbridge. A prebuilt archive has cxxbridge in its own folder or the parent folder, as in
# cargo's layout.
function(vmmgraph_cargo_archive target package prebuilt)
  if(prebuilt)
    get_filename_component(${target}_PATH "${prebuilt}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
    if(NOT EXISTS "${${target}_PATH}")
      message(FATAL_ERROR "${prebuilt}: there is no such archive")
    endif()
    get_filename_component(_dir "${${target}_PATH}" DIRECTORY)
    if(NOT EXISTS "${_dir}/cxxbridge" AND EXISTS "${_dir}/../cxxbridge")
      get_filename_component(_dir "${_dir}/.." ABSOLUTE)
    endif()
    add_custom_target(${target})
  else()
    string(REPLACE "-" "_" _name "${package}")
    set(_dir "${VMMGRAPH_CARGO_TARGET_DIR}")
    vmmgraph_cargo(${target} "lib${_name}.a" ${package} --lib)
  endif()
  set(${target}_PATH "${${target}_PATH}" PARENT_SCOPE)
  set(${target}_DIR "${_dir}" PARENT_SCOPE)
endfunction()

vmmgraph_cargo_archive(vmmgraph_archive vmmgraph "${VMMGRAPH_PREBUILT_ARCHIVE}")
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
