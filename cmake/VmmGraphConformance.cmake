# The program conformance, which tests whether a platform's device meets VmmGraph's requirements
# (docs/porting.md). Rust on the same core, as one file that needs only the C library.
set(VMMGRAPH_PREBUILT_CONFORMANCE "" CACHE FILEPATH "Take this program instead of calling cargo")
set(vmmgraph_conformance_PATH "${VMMGRAPH_PREBUILT_CONFORMANCE}")
if(NOT VMMGRAPH_PREBUILT_CONFORMANCE)
  # Without debug information, since line tables would contain this folder's name.
  vmmgraph_cargo(vmmgraph_conformance conformance vmmgraph-conformance --bin conformance -- -C strip=debuginfo)
endif()
if(VMMGRAPH_INSTALL)
  install(PROGRAMS "${vmmgraph_conformance_PATH}" DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT conformance)
endif()
