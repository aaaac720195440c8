# Third-party libraries. Debian's come through pkg-config or their CMake packages; libtorch is the wheel in the virtual environment.
find_package(PkgConfig REQUIRED)
find_package(Protobuf REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)
find_package(absl REQUIRED)
find_package(Boost 1.75 CONFIG REQUIRED)  # of which PFR: it is in 1.75 and later
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
pkg_check_modules(yaml_cpp REQUIRED IMPORTED_TARGET yaml-cpp)
pkg_check_modules(prometheus REQUIRED IMPORTED_TARGET prometheus-cpp-core)
pkg_check_modules(httplib REQUIRED IMPORTED_TARGET cpp-httplib)
find_package(OpenSSL 3 REQUIRED)
pkg_check_modules(grpcpp REQUIRED IMPORTED_TARGET grpc++)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)

execute_process(COMMAND "${TANDEM_PYTHON}" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
                OUTPUT_VARIABLE TANDEM_SITE_PACKAGES OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)

# find_package(Torch) insists on a CUDA toolkit even for a CPU build, so the targets are made by hand.
set(_torch_dir "${TANDEM_SITE_PACKAGES}/torch")
if(NOT EXISTS "${_torch_dir}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "libtorch not found in ${_torch_dir}: run `make setup` first")
endif()
add_library(torch_cpu INTERFACE)
target_include_directories(torch_cpu SYSTEM INTERFACE
  "${_torch_dir}/include" "${_torch_dir}/include/torch/csrc/api/include")
target_link_directories(torch_cpu INTERFACE "${_torch_dir}/lib")
# at::parallel_for is a header: without -fopenmp it is a plain call in our files. The runtime is the
# wheel's own, by its path: a second libgomp in the process would be a second pool of threads.
# ThreadSanitizer does not see how that runtime's threads wait for each other: there it stays a plain call.
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
  target_compile_options(torch_cpu INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fopenmp>")
endif()
target_link_libraries(torch_cpu INTERFACE
  -ltorch_cpu -lc10 "${_torch_dir}/lib/libgomp.so.1" Threads::Threads)
# The old-style RPATH is needed: libtorch's own dependencies are found through it.
target_link_options(torch_cpu INTERFACE "-Wl,--disable-new-dtags" "-Wl,--allow-shlib-undefined")
set(CMAKE_BUILD_RPATH "${_torch_dir}/lib")

if(TANDEM_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    find_program(CMAKE_CUDA_COMPILER nvcc HINTS /usr/local/cuda/bin)
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)  # the newest that CMake 3.25 passes to nvcc 13
  find_package(CUDAToolkit REQUIRED)
  # Nothing names a symbol of these, yet they register the CUDA backend when they are loaded.
  target_link_libraries(torch_cpu INTERFACE
    "-Wl,--push-state,--no-as-needed" torch_cuda c10_cuda "-Wl,--pop-state")
endif()
