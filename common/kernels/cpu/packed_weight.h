// Packed weights of linear maps: how they are written and read. The kernel packed_linear
// (cpu_kernels.h) multiplies by them.
//
// A matrix [out, in] is stored in panels of kPanelOuts outputs, one after the other. A panel is an
// array word[k / n][o] of 32 bits, where a word has n consecutive inputs of output o of the panel,
// the first in its lowest bits:
//
//   kFloat32, kBfloat16  n = 1 and 2
//   kInt8, kInt4         n = 4 and 8, signed; before the words of each group of kGroupInputs inputs
//                        stand its 16-bit scales[o]
//
// Numbers are little endian. The value of a quantised weight is q scale. It is exact in float32,
// because a scale has 8 significant bits and q at most 8; therefore products by a quantised matrix
// have the bits of products by its values in kFloat32. A bfloat16 scale takes 16 bits for each 32
// weights (half as many as float32, with the same range) and is widened by a shift on every
// instruction set.
#ifndef TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_
#define TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_

#include <cstdint>

#include "common/kernels/weight_format.h"

namespace tandem::kernels {

// A packed matrix [out, in], or the memory of one: PackedBytes(format, out, in) bytes, at a
// multiple of 64. The padding (rows from `out` on) must be zeros.
struct PackedMatrix {
  WeightFormat format = WeightFormat::kFloat32;
  void* data = nullptr;
  int64_t out = 0;
  int64_t in = 0;
};

// Writes the rows [first, first + rows) of a packed matrix from float32 rows, of which row i is at
// `values` + i * stride. Different rows may be written at the same time by several threads.
//
// kInt8 rounds a group to multiples of max |w| / 127; a weight moves by at most half a scale.
// kInt4 takes for the scale w / -8, with w the weight of the largest magnitude: all sixteen numbers
// are in use, and a weight moves by at most half a scale, or by about one at the far end of the
// other sign. A group with an infinity or a NaN becomes NaN.
void PackRows(const PackedMatrix& to, int64_t first, int64_t rows, const float* values,
              int64_t stride);

// Reads row `row` of a packed matrix: `values` [in].
void UnpackRow(const PackedMatrix& from, int64_t row, float* values);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_
