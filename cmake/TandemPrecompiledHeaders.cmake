# tandem_use_precompiled_headers(<target> <headers> <deps>)   for targets of which a dependency reaches libtorch
#
# Reading libtorch's headers is half of the time in which a file with them compiles: they are read
# once for all libraries (torch_headers) and once for all tests (torch_test_headers). A file names
# what it includes all the same: clang-tidy reads it without them (tests/lint/run_clang_tidy.py).
# With GCC alone: clang, which the fuzz targets need, would want a second way to keep them in ccache.

function(_tandem_precompiled_headers name)
  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/${name}.cc" CONTENT "")
  add_library(${name} OBJECT "${CMAKE_BINARY_DIR}/${name}.cc")
  target_compile_options(${name} PRIVATE -fpch-preprocess)
  target_link_libraries(${name} PRIVATE torch_cpu tandem_warnings)
  target_precompile_headers(${name} PRIVATE
    <ATen/ATen.h> <absl/status/statusor.h> <absl/strings/str_cat.h> ${ARGN})
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  _tandem_precompiled_headers(torch_headers)
  _tandem_precompiled_headers(torch_test_headers <gmock/gmock.h> <gtest/gtest.h>)
  target_link_libraries(torch_test_headers PRIVATE GTest::gmock)
endif()

function(tandem_use_precompiled_headers target headers deps)
  if(NOT TARGET ${headers})
    return()
  endif()
  foreach(dep IN LISTS deps)
    set(reaches_torch OFF)
    if(dep STREQUAL "torch_cpu")
      set(reaches_torch ON)
    elseif(TARGET ${dep})
      get_target_property(reaches_torch ${dep} TANDEM_REACHES_TORCH)
    endif()
    if(reaches_torch)
      set_target_properties(${target} PROPERTIES TANDEM_REACHES_TORCH ON)
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
      target_precompile_headers(${target} REUSE_FROM ${headers})
      return()
    endif()
  endforeach()
endfunction()
