// The formats in which the weight of a linear map can be stored. No torch.
#ifndef TANDEM_COMMON_KERNELS_WEIGHT_FORMAT_H_
#define TANDEM_COMMON_KERNELS_WEIGHT_FORMAT_H_

#include <cstdint>

namespace tandem::kernels {

// All but kDense are packed: panels of kPanelOuts outputs with the input index outside, in the same
// bytes for every instruction set, multiplied by float32 inputs (kBfloat16 by bf16 ones, too) and
// summed in float32 (common/kernels/cpu/packed_weight.h). They are for matrices that do not train,
// on a CPU.
enum class WeightFormat {
  kDense,     // a row-major matrix [out, in] in the type of the computation
  kFloat32,   // the float32 values
  kBfloat16,  // rounded to the nearest bfloat16, ties to even
  kInt8,      // 8-bit integers times a bfloat16 scale for each kGroupInputs inputs of an output
  kInt4,      // 4-bit integers times such a scale
};

inline constexpr int64_t kPanelOuts = 16;    // the last panel is padded with zero rows
inline constexpr int64_t kGroupInputs = 32;  // the last group is padded with zeros

// Returns the bytes of a panel of `in` inputs. `format` is packed.
constexpr int64_t PanelBytes(WeightFormat format, int64_t in) {
  constexpr int64_t kScaleBytes = 2 * kPanelOuts;
  const int64_t groups = (in + kGroupInputs - 1) / kGroupInputs;
  switch (format) {
    case WeightFormat::kDense:
      break;
    case WeightFormat::kFloat32:
      return in * kPanelOuts * 4;
    case WeightFormat::kBfloat16:
      return (in + 1) / 2 * kPanelOuts * 4;  // pairs of inputs
    case WeightFormat::kInt8:
      return groups * (kScaleBytes + kGroupInputs * kPanelOuts);
    case WeightFormat::kInt4:
      return groups * (kScaleBytes + kGroupInputs * kPanelOuts / 2);
  }
  return 0;
}

constexpr int64_t PanelCount(int64_t out) { return (out + kPanelOuts - 1) / kPanelOuts; }

// Returns the bytes of a packed matrix [out, in]. `format` is packed.
constexpr int64_t PackedBytes(WeightFormat format, int64_t out, int64_t in) {
  return PanelCount(out) * PanelBytes(format, in);
}

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_WEIGHT_FORMAT_H_
