// The search for values that are not finite among the bytes of a tensor. No torch.
#ifndef TANDEM_COMMON_WEIGHTS_FINITE_VALUES_H_
#define TANDEM_COMMON_WEIGHTS_FINITE_VALUES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "absl/types/span.h"
#include "common/tensor/dtype.h"

namespace tandem {
namespace internal {

// The exponent's bits are all set in an infinity or a NaN, and in no other value.
template <typename Bits>
std::optional<int64_t> FirstNotFinite(absl::Span<const std::byte> bytes, Bits exponent) {
  const auto is_one = [&](int64_t i) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    return (bits & exponent) == exponent;
  };
  const auto count = static_cast<int64_t>(bytes.size() / sizeof(Bits));
  constexpr int64_t kAtATime = 4096;  // without a branch for each, which compilers vectorise
  for (int64_t begin = 0; begin < count; begin += kAtATime) {
    const int64_t end = std::min(begin + kAtATime, count);
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) any |= static_cast<Bits>(is_one(i));
    if (any == 0) continue;
    for (int64_t i = begin;; ++i) {
      if (is_one(i)) return i;
    }
  }
  return std::nullopt;
}

}  // namespace internal

// Returns the index of the first value that is infinite or NaN; nullopt if all are finite. Other
// types than FLOAT64, FLOAT32, BFLOAT16 and FLOAT16 have finite values alone.
inline std::optional<int64_t> FirstNotFinite(DType dtype, absl::Span<const std::byte> bytes) {
  switch (dtype) {
    case DType::kFloat64:
      return internal::FirstNotFinite<uint64_t>(bytes, 0x7ff0000000000000);
    case DType::kFloat32:
      return internal::FirstNotFinite<uint32_t>(bytes, 0x7f800000);
    case DType::kBFloat16:
      return internal::FirstNotFinite<uint16_t>(bytes, 0x7f80);
    case DType::kFloat16:
      return internal::FirstNotFinite<uint16_t>(bytes, 0x7c00);
    default:
      return std::nullopt;
  }
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_FINITE_VALUES_H_
