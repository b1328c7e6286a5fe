# cmake -D HEADER=vmmgraph.h -P abi_coverage.cmake
#
# The hostile tests cover every function of the header.
include("${CMAKE_CURRENT_LIST_DIR}/declared.cmake")
file(GLOB files "${CMAKE_CURRENT_LIST_DIR}/hostile*_test.cpp")
set(hostile "")
foreach(file IN LISTS files)
  file(READ "${file}" text)
  string(APPEND hostile "${text}")
endforeach()
foreach(symbol IN LISTS declared)
  if(NOT hostile MATCHES "${symbol}[(),}]")
    message(SEND_ERROR "not in the hostile tests: ${symbol}")
  endif()
endforeach()
message(STATUS "${count} functions")
