// The greatest logit of each row, without the logits of all rows in memory.
#ifndef TANDEM_COMMON_SPECULATOR_HEADS_ARGMAX_ROWS_H_
#define TANDEM_COMMON_SPECULATOR_HEADS_ARGMAX_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ops/products/packed_weight.h"

namespace tandem::speculator {

// Returns for each row of x [N, m] the index [N] int64 of the greatest entry of x weight^T, for
// weight [V, m] of the same type; the lowest index among equals. Logits exist tile by tile, some
// MB at a time. Without autograd.
at::Tensor ArgmaxRows(const at::Tensor& x, const at::Tensor& weight);
// The same with the first `vocabulary` rows of a packed matrix, for x in float32.
at::Tensor ArgmaxRows(const at::Tensor& x, const ops::PackedWeight& weight, int64_t vocabulary);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_HEADS_ARGMAX_ROWS_H_
