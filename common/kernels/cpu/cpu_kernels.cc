#include "common/kernels/cpu/cpu_kernels.h"

#include <atomic>
#include <cstdlib>
#include <new>

#ifdef TANDEM_X86_KERNELS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/kernels/cpu/instruction_sets.h"

namespace tandem::kernels {
namespace {

// The table that UseCpuKernels has set.
std::atomic<const CpuKernels*> in_use = nullptr;

#ifdef TANDEM_X86_KERNELS

// The tile registers are large: Linux saves them only for processes that ask for them.
bool HasAmx() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arguments of arch_prctl
  constexpr unsigned int kBfloat16 = 1 << 22, kTiles = 1 << 24;
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBfloat16) != 0 &&
         (edx & kTiles) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Packing takes as long as multiplying 40 to 50 rows. MKL's bf16 products of few rows are faster
// than that; float32 products, which other CPUs than Intel's would take instead, are not.
constexpr int64_t kMinAmxSizeBesideMkl = 32;
constexpr int64_t kMinAvx512Size = 8;

#endif

}  // namespace

CpuFeatures DetectCpuFeatures() {
#ifdef TANDEM_X86_KERNELS
  return {.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
          .avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"),
          .avx512_bf16 = __builtin_cpu_supports("avx512bf16") != 0,
          .amx = HasAmx(),
          .intel = __builtin_cpu_is("intel") != 0};
#else
  return {};
#endif
}

CpuKernels ChooseCpuKernels(const CpuFeatures& cpu) {
#ifdef TANDEM_X86_KERNELS
  if (!cpu.avx512) return cpu.avx2 ? kAvx2Kernels : kPortableKernels;
  CpuKernels kernels = kAvx512Kernels;
  if (cpu.avx512_bf16) {
    kernels.bfloat16_linear = Avx512Bfloat16Linear;
    kernels.bfloat16_packed_linear = Avx512Bfloat16PackedLinear;
  }
  if (!cpu.intel) {
    kernels.float_product = {
        .name = "avx512", .multiply = Avx512Product, .min_size = kMinAvx512Size};
  }
  if (cpu.amx) {
    kernels.bfloat16_product = {.name = "amx",
                                .multiply = AmxProduct,
                                .min_size = cpu.intel ? kMinAmxSizeBesideMkl : 0,
                                .prefers_recompute = true};
  } else if (cpu.avx512_bf16 && !cpu.intel) {
    kernels.bfloat16_product = {.name = "avx512_bf16", .multiply = Avx512Bfloat16Product};
  }
  return kernels;
#else
  static_cast<void>(cpu);
  return kPortableKernels;
#endif
}

const CpuKernels kAtenKernels = {.name = "aten"};

const CpuKernels& GetCpuKernels() {
  static const CpuKernels fastest = ChooseCpuKernels(DetectCpuFeatures());
  const CpuKernels* const set = in_use.load(std::memory_order_acquire);
  return set != nullptr ? *set : fastest;
}

void UseCpuKernels(const CpuKernels* kernels) { in_use.store(kernels, std::memory_order_release); }

void* AllocateCacheLines(size_t bytes) {
  constexpr size_t kCacheLine = 64;
  void* const memory =
      std::aligned_alloc(kCacheLine, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace tandem::kernels
