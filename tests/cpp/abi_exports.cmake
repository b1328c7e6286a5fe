# cmake -D HEADER=vmmgraph.h -D LIBRARY=libvmmgraph.so -D NM=nm -P abi_exports.cmake
#
# The library exports exactly the functions of the header.
include("${CMAKE_CURRENT_LIST_DIR}/declared.cmake")
execute_process(COMMAND "${NM}" -D --defined-only --format=posix "${LIBRARY}"
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" exported "${symbols}")
list(TRANSFORM exported REPLACE " .*" "")
foreach(symbol IN LISTS exported)
  if(NOT symbol IN_LIST declared)
    message(SEND_ERROR "exported but not declared: ${symbol}")
  endif()
endforeach()
foreach(symbol IN LISTS declared)
  if(NOT symbol IN_LIST exported)
    message(SEND_ERROR "declared but not exported: ${symbol}")
  endif()
endforeach()
message(STATUS "${count} functions")
