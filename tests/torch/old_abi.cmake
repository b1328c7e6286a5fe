# Configuration refuses a torch with the old C++ ABI, before any program is loaded.
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE "${WORK}")
file(WRITE "${WORK}/torch/include/c10/cuda/CUDACachingAllocator.h" "")
foreach(lib c10 c10_cuda torch_cpu torch_cuda)
  file(WRITE "${WORK}/torch/lib/lib${lib}.so" "")
endforeach()
foreach(abi 0 1)
  file(WRITE "${WORK}/torch/share/cmake/Torch/TorchConfig.cmake" "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=${abi}\")\n")
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/build${abi}" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
      "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DVMMGRAPH_TORCH=ON "-DVMMGRAPH_TORCH_ROOT=${WORK}/torch" "-DVMMGRAPH_CUDA_INCLUDE=${CUDA_INCLUDE}"
      -DVMMGRAPH_TESTS=OFF -DVMMGRAPH_EXAMPLES=OFF
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(abi EQUAL 0 AND (result EQUAL 0 OR NOT output MATCHES "cxx11-abi"))
    message(FATAL_ERROR "the old ABI was accepted, or refused for another reason:\n${output}")
  elseif(abi EQUAL 1 AND NOT result EQUAL 0)
    message(FATAL_ERROR "the new ABI was refused:\n${output}")
  endif()
endforeach()
