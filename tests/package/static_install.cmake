# Installs a build from a prebuilt archive, with the static component and without Rust.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")
configure("${SOURCE_DIR}" "${WORK}/static-build" "-DVMMGRAPH_PREBUILT_ARCHIVE=${ARCHIVE}" -DVMMGRAPH_STATIC=ON
  -DVMMGRAPH_TESTS=OFF -DVMMGRAPH_EXAMPLES=OFF -DVMMGRAPH_CARGO=VMMGRAPH_CARGO-NOTFOUND -DVMMGRAPH_RUSTC=VMMGRAPH_RUSTC-NOTFOUND
  "-DCMAKE_PROGRAM_PATH=/nonexistent" -DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "configuring failed:\n${output}")
endif()
file(STRINGS "${WORK}/static-build/CMakeCache.txt" rust REGEX "^VMMGRAPH_(CARGO|RUSTC):.*=.*/(cargo|rustc)$")
if(rust)
  message(FATAL_ERROR "this build was to have no Rust: ${rust}")
endif()
run("${CMAKE_COMMAND}" --build "${WORK}/static-build" ${WITH_CONFIG})
file(REMOVE_RECURSE "${STATIC_PREFIX}")
run("${CMAKE_COMMAND}" --install "${WORK}/static-build" ${WITH_CONFIG} --prefix "${STATIC_PREFIX}")
if(NOT EXISTS "${STATIC_PREFIX}/${LIBDIR}/libvmmgraph.a")
  message(FATAL_ERROR "the archive was not installed:\n${output}")
endif()
check_no_path("${STATIC_PREFIX}" "${SOURCE_DIR}" "${WORK}")
