# Two calls of find_package; equal versions; optional components may be missing; C and C++ programs
# link and run, also without a C++ compiler.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")
build_consumer("${WORK}/consumer-c" "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCONSUMER_CXX=OFF
  "-DCONSUMER_STATIC_INSTALLED=${STATIC_INSTALLED}")
build_consumer("${WORK}/consumer" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DCONSUMER_STATIC_INSTALLED=${STATIC_INSTALLED}")
