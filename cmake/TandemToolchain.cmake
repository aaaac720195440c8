# Compiler, linker and cache settings shared by every target.
find_program(TANDEM_CCACHE ccache)
if(TANDEM_CCACHE)
  # Without these ccache keeps no file that reads a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros "${TANDEM_CCACHE}")
endif()
find_program(TANDEM_MOLD mold)
if(TANDEM_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
find_package(Threads REQUIRED)

# Our warnings are errors. Third-party headers come in as SYSTEM and stay quiet.
add_library(tandem_warnings INTERFACE)
target_compile_options(tandem_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror>")
# GCC 12 sees overlaps and overflows in std::string operator+ that are not there (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(tandem_warnings INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-stringop-overflow>")
endif()
# g++ collects its garbage from 128 MiB on, which is a tenth of the time in which a file of gRPC compiles.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=524288>")
endif()
