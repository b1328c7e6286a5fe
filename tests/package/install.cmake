# Checks the exact set of installed files per component, and the library's soname and search path.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

set(runtime "${LIBDIR}/libvmmgraph.so.${SOVERSION}" "${LIBDIR}/libvmmgraph.so.${VERSION}")
set(development
  "${INCLUDEDIR}/vmmgraph/vmmgraph.h"
  "${INCLUDEDIR}/vmmgraph/arena.hpp"
  "${INCLUDEDIR}/vmmgraph/base.hpp"
  "${INCLUDEDIR}/vmmgraph/device.hpp"
  "${INCLUDEDIR}/vmmgraph/dispatch.hpp"
  "${INCLUDEDIR}/vmmgraph/region.hpp"
  "${INCLUDEDIR}/vmmgraph/elastic.hpp"
  "${INCLUDEDIR}/vmmgraph/lease.hpp"
  "${INCLUDEDIR}/vmmgraph/share.hpp"
  "${INCLUDEDIR}/vmmgraph/blocks.hpp"
  "${INCLUDEDIR}/vmmgraph/policies.hpp"
  "${INCLUDEDIR}/vmmgraph/callback.hpp"
  "${INCLUDEDIR}/vmmgraph/plan.hpp"
  "${INCLUDEDIR}/vmmgraph/ring.hpp"
  "${INCLUDEDIR}/vmmgraph/vmmgraph.hpp"
  "${LIBDIR}/cmake/VmmGraph/VmmGraphConfig.cmake"
  "${LIBDIR}/cmake/VmmGraph/VmmGraphConfigVersion.cmake"
  "${LIBDIR}/cmake/VmmGraph/VmmGraphLibtorch.cmake"
  "${LIBDIR}/cmake/VmmGraph/VmmGraphTargets.cmake"
  "${LIBDIR}/cmake/VmmGraph/VmmGraphTargets-*.cmake"
  "${LIBDIR}/libvmmgraph.so"
  "${LIBDIR}/pkgconfig/vmmgraph.pc")
if(MEMORY_SAVER_INSTALLED)
  list(APPEND runtime "${LIBDIR}/libvmmgraph_memory_saver.so")
  list(APPEND development "${INCLUDEDIR}/vmmgraph/memory_saver.h")
endif()
if(STATIC_INSTALLED)
  list(APPEND development "${LIBDIR}/libvmmgraph.a")
endif()
set(conformance "")
if(CONFORMANCE_INSTALLED)
  set(conformance "${BINDIR}/conformance")
endif()

function(check_files prefix)
  file(GLOB_RECURSE found LIST_DIRECTORIES FALSE RELATIVE "${prefix}" "${prefix}/*")
  list(TRANSFORM found REPLACE "VmmGraphTargets-[a-z]+.cmake" "VmmGraphTargets-*.cmake")
  set(expected ${ARGN})
  list(SORT found)
  list(SORT expected)
  if(NOT found STREQUAL expected)
    message(FATAL_ERROR "${prefix} holds\n ${found}\nand not\n ${expected}")
  endif()
endfunction()

install_build("${WORK}/runtime" runtime)
check_files("${WORK}/runtime" ${runtime})
install_build("${WORK}/development" development)
check_files("${WORK}/development" ${development})
file(REMOVE_RECURSE "${WORK}/runtime" "${WORK}/development")
install_build("${PREFIX}")
check_files("${PREFIX}" ${runtime} ${development} ${conformance})

run("${READELF}" -d "${PREFIX}/${LIBDIR}/libvmmgraph.so")
foreach(line "SONAME.*\\[libvmmgraph\\.so\\.${SOVERSION}\\]" "R(UN)?PATH.*\\[\\$ORIGIN\\]" "NODELETE" "NOW")
  if(NOT output MATCHES "${line}")
    message(SEND_ERROR "no ${line} in the dynamic section:\n${output}")
  endif()
endforeach()
if(output MATCHES "libstdc\\+\\+|libcuda|libasan")
  message(SEND_ERROR "the library needs more than it should:\n${output}")
endif()

if(MEMORY_SAVER_INSTALLED)
  # The memory saver links no libcuda, CUDA runtime or core: it opens the loaded library, or the one
  # in its folder.
  run("${READELF}" -d "${PREFIX}/${LIBDIR}/libvmmgraph_memory_saver.so")
  foreach(line "R(UN)?PATH.*\\[\\$ORIGIN\\]" "NODELETE" "NOW")
    if(NOT output MATCHES "${line}")
      message(SEND_ERROR "no ${line} in the dynamic section:\n${output}")
    endif()
  endforeach()
  if(output MATCHES "libcuda|NEEDED[^\n]*libvmmgraph")
    message(SEND_ERROR "the memory saver needs more than it should:\n${output}")
  endif()
endif()
