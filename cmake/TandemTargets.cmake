# tandem_library(<name> SRCS … DEPS …)                   static library tandem_<name>, alias tandem::<name>
# tandem_server(<name> SRCS … DEPS …)                    server binary in <build>/bin
# tandem_install_server(<name>)                          bin/<name> of what `cmake --install` makes
# tandem_test(<name> SRCS … DEPS …)                      GoogleTest binary registered with CTest
# tandem_tool(<name> SRCS … DEPS …)                      another binary in <build>/bin, for tests and benchmarks
# Includes are always written from the repository's root: #include "common/base/errors/status_macros.h".

function(_tandem_configure target)
  target_include_directories(${target} PUBLIC "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE tandem_warnings)
endfunction()

function(tandem_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(tandem_${name} STATIC ${ARG_SRCS})
  add_library(tandem::${name} ALIAS tandem_${name})
  _tandem_configure(tandem_${name})
  target_link_libraries(tandem_${name} PUBLIC ${ARG_DEPS})
  tandem_use_precompiled_headers(tandem_${name} "${ARG_DEPS}")
endfunction()

function(tandem_server name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  # The sources speak gRPC, and the engine's dependency libtorch ships old google/ headers: they are
  # compiled on their own, without the include folders of what the binary links.
  add_library(${name}_main OBJECT ${ARG_SRCS} "${CMAKE_SOURCE_DIR}/common/rpc/server/early_signals.cc")
  _tandem_configure(${name}_main)
  target_link_libraries(${name}_main PRIVATE tandem::rpc)
  add_executable(${name} $<TARGET_OBJECTS:${name}_main>)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin"
                        INSTALL_RPATH "$ORIGIN/../lib")
endfunction()

# The libraries of the virtual environment are copied into lib/ beside bin/, so that the tree can be
# moved. Debian's libraries stay the system's.
function(tandem_install_server name)
  install(TARGETS ${name} RUNTIME_DEPENDENCIES
            POST_INCLUDE_REGEXES "^${TANDEM_SITE_PACKAGES}/.*" POST_EXCLUDE_REGEXES ".*"
          RUNTIME DESTINATION bin COMPONENT ${name}
          LIBRARY DESTINATION lib COMPONENT ${name})
endfunction()

function(tandem_test name)
  if(NOT TANDEM_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  _tandem_configure(${name})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  tandem_use_precompiled_headers(${name} "${ARG_DEPS}" TEST)
  # A test's own code takes a third less time to compile than with -O3.
  target_compile_options(${name} PRIVATE "$<$<CONFIG:Release>:-O1>")
  add_test(NAME ${name} COMMAND ${name})
  # Several tests share the cores: a thread that waits must not spin while another one works.
  set_tests_properties(${name} PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=PASSIVE)
endfunction()

function(tandem_tool name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  _tandem_configure(${name})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  tandem_use_precompiled_headers(${name} "${ARG_DEPS}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
endfunction()
