#include <cstring>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::kernels {

extern const CpuKernels kPortableKernels;
#ifdef TANDEM_X86_KERNELS
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

const CpuKernels* FindCpuKernels(const char* isa) {
#ifdef TANDEM_X86_KERNELS
  if (std::strcmp(isa, kAvx512Kernels.isa) == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw")) {
    return &kAvx512Kernels;
  }
  if (std::strcmp(isa, kAvx2Kernels.isa) == 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return &kAvx2Kernels;
  }
#endif
  return std::strcmp(isa, kPortableKernels.isa) == 0 ? &kPortableKernels : nullptr;
}

const CpuKernels& GetCpuKernels() {
  static const CpuKernels& best = []() -> const CpuKernels& {
    if (const CpuKernels* found = FindCpuKernels("avx512")) return *found;
    if (const CpuKernels* found = FindCpuKernels("avx2")) return *found;
    return kPortableKernels;
  }();
  return best;
}

}  // namespace tandem::kernels
