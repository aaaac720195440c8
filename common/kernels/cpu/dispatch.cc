#include <cstring>

#ifdef TANDEM_X86_KERNELS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/kernels/cpu/product_kernels.h"

namespace tandem::kernels {

extern const CpuKernels kPortableKernels;
#ifdef TANDEM_X86_KERNELS
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
void Avx512Product(const ProductArgs<float>& args);
void Avx512Bfloat16Product(const ProductArgs<uint16_t>& args);
void AmxProduct(const ProductArgs<uint16_t>& args);

namespace {

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
}

// The registers are large: the kernel saves them only for processes that ask for them.
bool MayUseAmx() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  constexpr unsigned int kBfloat16 = 1 << 22, kTiles = 1 << 24;
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBfloat16) != 0 &&
         (edx & kTiles) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace
#endif

const CpuKernels* FindCpuKernels(const char* isa) {
#ifdef TANDEM_X86_KERNELS
  if (std::strcmp(isa, kAvx512Kernels.isa) == 0 && HasAvx512()) return &kAvx512Kernels;
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

FloatProduct FindFloatProduct(const char* isa) {
#ifdef TANDEM_X86_KERNELS
  if (std::strcmp(isa, "avx512") == 0 && HasAvx512()) return Avx512Product;
#endif
  return nullptr;
}

Bfloat16Product FindBfloat16Product(const char* isa) {
#ifdef TANDEM_X86_KERNELS
  if (!HasAvx512()) return nullptr;  // with which each of them packs
  if (std::strcmp(isa, "amx") == 0) {
    static const bool granted = MayUseAmx();
    return granted ? AmxProduct : nullptr;
  }
  if (std::strcmp(isa, "avx512_bf16") == 0 && __builtin_cpu_supports("avx512bf16")) {
    return Avx512Bfloat16Product;
  }
#endif
  return nullptr;
}

}  // namespace tandem::kernels
