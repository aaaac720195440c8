#include "common/ops/rotary/rotary_table.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "common/ops/ops.h"
#include "common/ops/rotary/rotary_growth.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {

void RotaryTable::Grow(int64_t length) {
  const int64_t half = static_cast<int64_t>(inverse_frequencies_.size());
  at::Tensor cos = at::empty({length, half}, at::kFloat);
  at::Tensor sin = at::empty({length, half}, at::kFloat);
  float* cos_row = cos.data_ptr<float>();
  float* sin_row = sin.data_ptr<float>();
  for (int64_t position = 0; position < length; ++position) {
    for (int64_t d = 0; d < half; ++d) {
      const float angle = static_cast<float>(position) * inverse_frequencies_[d];
      *cos_row++ = static_cast<float>(std::cos(static_cast<double>(angle)) * scaling_);
      *sin_row++ = static_cast<float>(std::sin(static_cast<double>(angle)) * scaling_);
    }
  }
  // The tables change together: a device may have no memory for the second.
  at::Tensor device_cos = CopyToDevice(cos, device_);
  sin_ = CopyToDevice(sin, device_);
  cos_ = std::move(device_cos);
}

std::pair<at::Tensor, at::Tensor> RotaryTable::Tables(int64_t end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t have = cos_.defined() ? cos_.size(0) : 0;
  if (end > have || have == 0) Grow(RotaryTableLength(have, end, longest_sequence_));
  return {cos_, sin_};
}

void RotaryTable::Reserve(int64_t end) { Tables(end); }

std::pair<at::Tensor, at::Tensor> RotaryTable::Rows(const at::Tensor& positions, int64_t end) {
  const auto [cos, sin] = Tables(end);
  return {SelectRows(cos, positions), SelectRows(sin, positions)};
}

}  // namespace tandem::ops
