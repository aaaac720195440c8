// Statistics of rows of logits with the kernel of a GPU, for the loss of a trainer and for the
// log-probabilities of drawn tokens: one function, so that both have the same bits.
#ifndef TANDEM_COMMON_OPS_LOGIT_STATISTICS_H_
#define TANDEM_COMMON_OPS_LOGIT_STATISTICS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem::ops {

// Whether the kernel is there for logits like these: float32.
bool HasLogitStatistics(at::Device device, at::ScalarType type);

// Writes the statistics of logits [N, w], contiguous, the columns from `first_label` on of a
// vocabulary, times `scales` [N] (undefined: 1): the largest of a row, the sum of the exponentials
// below it, the same weighted with how far they are below, and the number of the label [N] (0 where
// it is not among the columns); each [N] float32.
void LogitStatistics(const at::Tensor& logits, const at::Tensor& scales, const at::Tensor& labels,
                     int64_t first_label, const at::Tensor& max, const at::Tensor& sum,
                     const at::Tensor& weighted, const at::Tensor& label);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LOGIT_STATISTICS_H_
