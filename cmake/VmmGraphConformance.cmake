# The program conformance, which tests whether a platform's device meets VmmGraph's requirements
# (docs/porting.md). Rust on the same core, as one file that needs only the C library.
set(VMMGRAPH_CONFORMANCE_TARGET_DIR "${PROJECT_BINARY_DIR}/cargo-conformance" CACHE PATH
  "cargo's target folder for conformance: one that has built the core before saves a minute")
mark_as_advanced(VMMGRAPH_CONFORMANCE_TARGET_DIR)
if(NOT VMMGRAPH_CARGO)
  message(FATAL_ERROR "conformance is Rust, and cargo was not found: set VMMGRAPH_CARGO, or VMMGRAPH_CONFORMANCE=OFF.")
endif()
set(_conformance "${VMMGRAPH_CONFORMANCE_TARGET_DIR}/$<IF:$<CONFIG:Debug>,debug,release>/conformance")
set(_flags "")
if(VMMGRAPH_CARGO_OFFLINE)
  set(_flags --offline)
endif()
# Always run cargo, which detects changes. Strip debug information, since line tables would contain
# this folder's name.
add_custom_target(vmmgraph_conformance ALL
  COMMAND "${CMAKE_COMMAND}" -E env --unset=CC --unset=CXX --unset=CFLAGS --unset=CXXFLAGS
    "CARGO_TARGET_DIR=${VMMGRAPH_CONFORMANCE_TARGET_DIR}"
    "${VMMGRAPH_CARGO}" rustc --locked --package vmmgraph-conformance --bin conformance
    "--profile=$<IF:$<CONFIG:Debug>,dev,release>" ${_flags} -- -C strip=debuginfo
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
  COMMENT "Building conformance"
  USES_TERMINAL
  VERBATIM)
if(VMMGRAPH_INSTALL)
  install(PROGRAMS "${_conformance}" DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT conformance)
endif()
