cmake_minimum_required(VERSION 3.24)
# Runs PROGRAM with ARGUMENT. Fails unless it succeeds, its output matches EXPECTED, and stderr is
# empty.
execute_process(COMMAND "${PROGRAM}" ${ARGUMENT} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
message("${output}${error}")
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} ended with ${result}")
endif()
if(NOT output MATCHES "${EXPECTED}")
  message(FATAL_ERROR "the output does not match ${EXPECTED}")
endif()
if(NOT error STREQUAL "")
  message(FATAL_ERROR "something was written to stderr")
endif()
