// TANDEM_UNROLL stands before a loop over an array of vectors, which stays in registers only if
// every index is a constant.
#ifndef TANDEM_COMMON_KERNELS_CPU_UNROLL_H_
#define TANDEM_COMMON_KERNELS_CPU_UNROLL_H_

#ifdef __clang__
#define TANDEM_UNROLL _Pragma("unroll")
#else
#define TANDEM_UNROLL _Pragma("GCC unroll 16")
#endif

#endif  // TANDEM_COMMON_KERNELS_CPU_UNROLL_H_
