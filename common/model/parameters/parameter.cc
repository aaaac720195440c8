#include "common/model/parameters/parameter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>

#include "common/ops/products/bfloat16_rounding.h"

namespace tandem {

void Parameter::CopyFrom(const at::Tensor& whole, ops::PackThreads threads) const {
  const at::NoGradGuard no_grad;
  if (packed != nullptr) {
    packed->SetRows(packed_row, shard.Of(whole), threads);
  } else {
    value.copy_(shard.Of(whole));
  }
}

at::Tensor Parameter::ComputedValue() const {
  if (packed == nullptr) return rounded ? ops::Rounded(value.detach()) : value.detach();
  const int64_t rows = shard.ShapeOf(spec.shape)[0];
  return packed->Rows(at::arange(packed_row, packed_row + rows, at::kLong));
}

}  // namespace tandem
