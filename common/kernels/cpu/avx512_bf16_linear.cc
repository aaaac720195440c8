#define TANDEM_SIMD_WIDTH 16
#define TANDEM_SIMD_ROWS 6
#define TANDEM_PACKED_TILE_ROWS 12
#define TANDEM_PACKED_SUMS 24
#include "common/kernels/cpu/simd_impl.h"
// After simd_impl.h, whose vectors it uses.
#include "common/kernels/cpu/packed_linear_impl.h"

namespace tandem::kernels {

void Avx512Bfloat16Linear(const LinearArgs<uint16_t>& args) { Bfloat16Linear(args); }
void Avx512Bfloat16PackedLinear(const PackedLinearArgs<uint16_t>& args) {
  Bfloat16PackedLinear(args);
}

}  // namespace tandem::kernels
