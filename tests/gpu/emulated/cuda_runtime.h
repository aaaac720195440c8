// The parts of CUDA's runtime that the project's kernels and their tests use, for a host without
// it: the threads of a block are fibers of one thread (blocks.cc). Found in place of CUDA's header.
#ifndef TANDEM_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_
#define TANDEM_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's.
#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

inline const char* cudaGetErrorString(cudaError_t /*error*/) { return "out of memory"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// A small Hopper.
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 2;
  return cudaSuccess;
}

// Memory between two pages that nobody may touch; the seed decides at which of them it lies.
cudaError_t cudaMalloc(void** data, size_t bytes);
cudaError_t cudaFree(void* data);
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

namespace tandem::emulated {

// The order in which the threads of a block run between two barriers follows from the seed, and
// whether memory of cudaMalloc ends where a page does (even seeds) or begins there.
void SetSeed(uint64_t seed);

// Returns memory between two pages that nobody may touch, with all bits set: it ends where the
// second of them begins, or begins where the first one ends. nullptr where there is none.
void* AllocateFenced(size_t bytes, bool at_end);
void FreeFenced(void* memory);

// Runs the threads of all blocks. Ends the process where some threads of a block or a warp wait at
// a barrier that others do not reach.
void RunBlocks(unsigned blocks, unsigned threads, const std::function<void()>& thread);

// Waits for the threads of the warp, and returns a lane's value.
uint64_t Exchange(uint64_t value, unsigned lane);

}  // namespace tandem::emulated

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();

template <typename T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lanes) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = tandem::emulated::Exchange(bits, threadIdx.x % 32 ^ static_cast<unsigned>(lanes));
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args), dim3 blocks, dim3 threads, void** arguments,
                             size_t /*shared_bytes*/, cudaStream_t /*stream*/) {
  const Args& args = *static_cast<const Args*>(arguments[0]);
  tandem::emulated::RunBlocks(blocks.x, threads.x, [&] { kernel(args); });
  return cudaSuccess;
}

// NOLINTEND(bugprone-reserved-identifier)

#endif  // TANDEM_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_
