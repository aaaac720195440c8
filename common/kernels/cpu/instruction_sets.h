// The kernels of every instruction set, from which cpu_kernels.cc chooses. Each is in a source file
// that is compiled for its instruction set.
#ifndef TANDEM_COMMON_KERNELS_CPU_INSTRUCTION_SETS_H_
#define TANDEM_COMMON_KERNELS_CPU_INSTRUCTION_SETS_H_

#include <cstddef>
#include <cstdint>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::kernels {

// Tables without product kernels.
extern const CpuKernels kPortableKernels, kAvx2Kernels, kAvx512Kernels;

void Avx512Product(const ProductArgs<float>& args);
void Avx512Bfloat16Product(const ProductArgs<uint16_t>& args);
void AmxProduct(const ProductArgs<uint16_t>& args);

// The entries bfloat16_linear and bfloat16_packed_linear with AVX-512-BF16.
void Avx512Bfloat16Linear(const LinearArgs<uint16_t>& args);
void Avx512Bfloat16PackedLinear(const PackedLinearArgs<uint16_t>& args);

// Returns memory aligned to cache lines, to be given to std::free. Throws std::bad_alloc. It is not
// in the files above because they instantiate nothing of the standard library.
void* AllocateCacheLines(size_t bytes);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_INSTRUCTION_SETS_H_
