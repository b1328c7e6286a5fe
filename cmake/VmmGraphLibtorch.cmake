# Torch for the component, its tests and its users (component libtorch of the package): the target
# VmmGraph::libtorch, VMMGRAPH_TORCH_ROOT, VMMGRAPH_CUDA_INCLUDE, and VMMGRAPH_TORCH_FOLDERS, the
# folders of torch's libraries and libcudart (with generator expressions).
#
#   VMMGRAPH_TORCH_FIND   ON: use find_package(Torch), which needs a CUDA toolkit; the default if
#                         the target torch exists
#   VMMGRAPH_TORCH_ROOT   otherwise: the folder of a pip torch (…/site-packages/torch); default:
#                         found by python3
#
# A pip torch needs no toolkit. Headers come from the pip packages nvidia-cuda-runtime and
# nvidia-cuda-crt beside torch, or from CUDA_HOME; torch's libraries are linked by path.
if(TARGET vmmgraph_libtorch)
  return()
endif()

set(_torch_there OFF)
if(TARGET torch)
  set(_torch_there ON)
endif()
option(VMMGRAPH_TORCH_FIND "Take torch from find_package(Torch)" ${_torch_there})
set(VMMGRAPH_TORCH_ROOT "" CACHE PATH "The folder of a pip torch")

# Not installed: programs that link VmmGraph::torch need not find torch.
add_library(vmmgraph_libtorch INTERFACE)
add_library(VmmGraph::libtorch ALIAS vmmgraph_libtorch)
target_compile_features(vmmgraph_libtorch INTERFACE cxx_std_20)

if(VMMGRAPH_TORCH_FIND)
  if(NOT TARGET torch)
    find_package(Torch REQUIRED)
  endif()
  if(NOT TARGET torch_cuda)
    message(FATAL_ERROR "cannot use the torch of find_package(Torch): it is built without CUDA (Torch_DIR='${Torch_DIR}'); install a CUDA build")
  endif()
  target_link_libraries(vmmgraph_libtorch INTERFACE torch)
  get_target_property(_includes torch INTERFACE_INCLUDE_DIRECTORIES)
  list(GET _includes 0 _include)
  get_filename_component(_root "${_include}" DIRECTORY)
  set(VMMGRAPH_TORCH_ROOT "${_root}" CACHE PATH "The folder of a pip torch" FORCE)
  get_target_property(VMMGRAPH_CUDA_INCLUDE CUDA::cudart INTERFACE_INCLUDE_DIRECTORIES)
  set(VMMGRAPH_TORCH_FOLDERS "$<TARGET_FILE_DIR:torch_cuda>" "$<TARGET_FILE_DIR:CUDA::cudart>")
else()
  if(NOT VMMGRAPH_TORCH_ROOT)
    execute_process(
      COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(VMMGRAPH_TORCH_ROOT "${_found}" CACHE PATH "The folder of a pip torch" FORCE)
  endif()
  if(NOT EXISTS "${VMMGRAPH_TORCH_ROOT}/include/c10/cuda/CUDACachingAllocator.h")
    message(FATAL_ERROR "cannot find a CUDA torch at VMMGRAPH_TORCH_ROOT='${VMMGRAPH_TORCH_ROOT}'; set it to the folder .../site-packages/torch")
  endif()
  find_path(VMMGRAPH_CUDA_INCLUDE cuda_runtime_api.h
    HINTS "${VMMGRAPH_TORCH_ROOT}/../nvidia/cu13/include" "${VMMGRAPH_TORCH_ROOT}/../nvidia/cuda_runtime/include" "$ENV{CUDA_HOME}/include"
    PATHS /usr/local/cuda/include REQUIRED)
  # Wheels have no unversioned libcudart.so to link with.
  find_file(VMMGRAPH_CUDART NAMES libcudart.so.13 libcudart.so.12 libcudart.so
    HINTS "${VMMGRAPH_CUDA_INCLUDE}/../lib" "${VMMGRAPH_CUDA_INCLUDE}/../lib64" REQUIRED)
  target_include_directories(vmmgraph_libtorch SYSTEM INTERFACE
    "${VMMGRAPH_TORCH_ROOT}/include" "${VMMGRAPH_TORCH_ROOT}/include/torch/csrc/api/include" "${VMMGRAPH_CUDA_INCLUDE}")
  foreach(_lib c10 c10_cuda torch_cpu torch_cuda)
    target_link_libraries(vmmgraph_libtorch INTERFACE "${VMMGRAPH_TORCH_ROOT}/lib/lib${_lib}.so")
  endforeach()
  target_link_libraries(vmmgraph_libtorch INTERFACE "${VMMGRAPH_CUDART}")
  target_link_options(vmmgraph_libtorch INTERFACE LINKER:--no-as-needed)
  get_filename_component(_cudart_folder "${VMMGRAPH_CUDART}" DIRECTORY)
  set(VMMGRAPH_TORCH_FOLDERS "${VMMGRAPH_TORCH_ROOT}/lib" "${_cudart_folder}")
endif()
# PyPI wheels up to 2.6 were built with the old std::string; libraries built here would fail to find
# their symbols at load time.
set(_torch_config "${VMMGRAPH_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake")
if(EXISTS "${_torch_config}")
  file(STRINGS "${_torch_config}" _old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_old_abi)
    message(FATAL_ERROR "The torch at ${VMMGRAPH_TORCH_ROOT} was built with _GLIBCXX_USE_CXX11_ABI=0, which VmmGraph::torch cannot be. "
      "Take a build with the new ABI: libtorch's cxx11-abi archives, conda's packages, or PyPI's wheels from 2.7 on.")
  endif()
endif()

# torch_cuda registers its operators at load time and is not referenced by symbols, so no-as-needed
# is required; the target torch sets it. Dependencies of torch_cuda (cuBLAS, cuDNN, …) are found at
# run time.
target_link_options(vmmgraph_libtorch INTERFACE LINKER:--allow-shlib-undefined)
