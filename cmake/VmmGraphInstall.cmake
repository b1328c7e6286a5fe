# Installation. Component runtime: the library; development: headers and build files.
include(CMakePackageConfigHelpers)

set(_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/VmmGraph")
set(_config_build_dir "${PROJECT_BINARY_DIR}/config")

install(TARGETS vmmgraph EXPORT VmmGraphTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development)
# Headers of optional components are installed with the component's library.
set(_torch_headers torch.hpp torch_region.hpp torch_elastic.hpp torch_eager.hpp torch_c.h engine.hpp inputs.hpp)
list(TRANSFORM _torch_headers REPLACE "(.+)" "PATTERN;\\1;EXCLUDE" OUTPUT_VARIABLE _without_torch)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/vmmgraph" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" ${_without_torch} PATTERN "memory_saver.h" EXCLUDE PATTERN "torch_npu.hpp" EXCLUDE)
install(EXPORT VmmGraphTargets NAMESPACE VmmGraph:: DESTINATION "${_config_dir}" COMPONENT development)
if(VMMGRAPH_TORCH)
  install(TARGETS vmmgraph_torch EXPORT VmmGraphTorchTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development)
  list(TRANSFORM _torch_headers PREPEND "${PROJECT_SOURCE_DIR}/include/vmmgraph/")
  install(FILES ${_torch_headers} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/vmmgraph" COMPONENT development)
  install(EXPORT VmmGraphTorchTargets NAMESPACE VmmGraph:: DESTINATION "${_config_dir}" COMPONENT development)
endif()
if(VMMGRAPH_TORCH_NPU)
  install(TARGETS vmmgraph_torch_npu EXPORT VmmGraphTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development)
  install(FILES "${PROJECT_SOURCE_DIR}/include/vmmgraph/torch_npu.hpp"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/vmmgraph" COMPONENT development)
endif()
if(VMMGRAPH_MEMORY_SAVER)
  install(TARGETS vmmgraph_memory_saver EXPORT VmmGraphTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime)
  install(FILES "${PROJECT_SOURCE_DIR}/include/vmmgraph/memory_saver.h"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/vmmgraph" COMPONENT development)
endif()
if(VMMGRAPH_STATIC)
  install(FILES "${VMMGRAPH_ARCHIVE}" DESTINATION "${CMAKE_INSTALL_LIBDIR}" RENAME libvmmgraph.a COMPONENT development)
endif()

# Relative to the prefix, so the installed tree can be moved.
foreach(_dir LIBDIR INCLUDEDIR)
  file(RELATIVE_PATH VMMGRAPH_${_dir} "${CMAKE_INSTALL_PREFIX}" "${CMAKE_INSTALL_FULL_${_dir}}")
  set(VMMGRAPH_PC_${_dir} "\${prefix}/${VMMGRAPH_${_dir}}")
endforeach()
file(RELATIVE_PATH VMMGRAPH_PC_PREFIX "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" VMMGRAPH_PC_PREFIX "${VMMGRAPH_PC_PREFIX}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/VmmGraphConfig.cmake.in"
  "${_config_build_dir}/VmmGraphConfig.cmake" INSTALL_DESTINATION "${_config_dir}")
write_basic_package_version_file("${_config_build_dir}/VmmGraphConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
configure_file("${PROJECT_SOURCE_DIR}/cmake/vmmgraph.pc.in" "${_config_build_dir}/vmmgraph.pc" @ONLY)
install(
  FILES "${_config_build_dir}/VmmGraphConfig.cmake" "${_config_build_dir}/VmmGraphConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/VmmGraphLibtorch.cmake"
  DESTINATION "${_config_dir}" COMPONENT development)
install(FILES "${_config_build_dir}/vmmgraph.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT development)
