# tandem_use_precompiled_headers(<target> <deps> [TEST])   for libraries, tools and tests (TEST)
#
# Reading libtorch's headers is half of the time in which a file with them compiles, and gRPC's or
# gmock's are not much smaller: they are read once for all libraries and once for all tests, by the
# heaviest of them that the target's dependencies reach. A file names what it includes all the same:
# clang-tidy reads it without them (tests/lint/run_clang_tidy.py).
# With GCC alone: clang, which the fuzz targets need, would want a second way to keep them in ccache.

# <kind>_headers and <kind>_test_headers: ARGN beside what nearly every file includes.
function(_tandem_precompiled_headers kind link)
  foreach(name ${kind}_headers ${kind}_test_headers)
    file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/${name}.cc" CONTENT "")
    add_library(${name} OBJECT "${CMAKE_BINARY_DIR}/${name}.cc")
    target_compile_options(${name} PRIVATE -fpch-preprocess)
    target_link_libraries(${name} PRIVATE ${link} tandem_warnings)
    target_precompile_headers(${name} PRIVATE <functional> <map> <memory> <optional> <string> <vector>
      <absl/status/statusor.h> <absl/strings/str_cat.h> ${ARGN})
  endforeach()
  target_link_libraries(${kind}_test_headers PRIVATE GTest::gmock)
  target_precompile_headers(${kind}_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  _tandem_precompiled_headers(plain "absl::statusor;absl::strings")
  _tandem_precompiled_headers(torch torch_cpu <ATen/ATen.h>)
  _tandem_precompiled_headers(grpc PkgConfig::grpcpp <grpcpp/grpcpp.h>)
endif()

# Sets TANDEM_REACHES on the target, to torch, grpc or plain: the heaviest headers behind `deps`.
# No file has both those of torch and of gRPC (tests/lint/check_layers.py).
function(_tandem_reaches target deps result)
  set(reaches plain)
  foreach(dep IN LISTS deps)
    set(through plain)
    if(dep STREQUAL "torch_cpu")
      set(through torch)
    elseif(dep STREQUAL "PkgConfig::grpcpp")
      set(through grpc)
    elseif(TARGET ${dep})
      get_target_property(known ${dep} TANDEM_REACHES)
      if(known)
        set(through ${known})
      endif()
    endif()
    if(through STREQUAL "torch" OR (through STREQUAL "grpc" AND reaches STREQUAL "plain"))
      set(reaches ${through})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES TANDEM_REACHES ${reaches})
  set(${result} ${reaches} PARENT_SCOPE)
endfunction()

function(tandem_use_precompiled_headers target deps)
  cmake_parse_arguments(ARG "TEST" "" "" ${ARGN})
  _tandem_reaches(${target} "${deps}" reaches)
  # A library without dependencies has sources with instruction sets of their own.
  if(NOT TARGET plain_headers OR deps STREQUAL "")
    return()
  endif()
  set(headers ${reaches}_headers)
  if(ARG_TEST)
    set(headers ${reaches}_test_headers)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
  target_precompile_headers(${target} REUSE_FROM ${headers})
endfunction()
