// Packed weights of linear maps: how they are written and read. The kernel packed_linear
// (cpu_kernels.h) multiplies by them.
//
// A matrix [out, in] is stored in panels of kPanelOuts outputs, one after the other. In a panel the
// inputs are outside:
//
//   kFloat32, kBfloat16  an array word[k / n][o] of 32 bits. A word has n = 1 or 2 consecutive
//   inputs
//                        of output o of the panel, the first in its lowest bits.
//   kInt8, kInt4         a record for each group of kGroupInputs inputs: the 16-bit scale[i], then
//   an
//                        array unit[k / n][i] of 16 bits. A unit has n = 2 or 4 consecutive inputs,
//                        the first in its lowest bits, each as q + 128 or q + 8. Index i goes over
//                        the outputs in the order 0-3, 8-11, 4-7, 12-15: the instructions that
//                        widen 16 bits then give outputs in their own order.
//
// Numbers are little endian. The value of a quantised weight is q scale, and 0 for q = 0. It is
// exact in float32, because a scale has 8 significant bits and q at most 8; therefore products by a
// quantised matrix have the bits of products by its values in kFloat32. A bfloat16 scale takes 16
// bits for each 32 weights, half as many as float32.
#ifndef TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_
#define TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_

#include <cstdint>

#include "common/kernels/weight_format.h"

namespace tandem::kernels {

// Returns the place of output `lane` among the units of a panel, and the output in that place: the
// order is its own inverse.
constexpr int64_t UnitOfLane(int64_t lane) {
  return (lane & 3) | ((lane & 4) << 1) | ((lane & 8) >> 1);
}

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
// other sign. A group with a NaN or a magnitude above 2^110 becomes NaN: the
// kernels multiply scales by up to 2^16.
void PackRows(const PackedMatrix& to, int64_t first, int64_t rows, const float* values,
              int64_t stride);

// The same for rows of bfloat16 numbers and a matrix of kBfloat16, which keeps their bits.
void PackBfloat16Rows(const PackedMatrix& to, int64_t first, int64_t rows, const uint16_t* values,
                      int64_t stride);

// Rounds `count` values to those that kBfloat16 stores: to the nearest bfloat16, ties to even; NaN
// stays NaN. `to` may be `from`.
void RoundToBfloat16(const float* from, int64_t count, float* to);

// Reads row `row` of a packed matrix: `values` [in].
void UnpackRow(const PackedMatrix& from, int64_t row, float* values);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_PACKED_WEIGHT_H_
