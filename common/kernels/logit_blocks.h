// The order in which a row of logits is summed up, the same for the sampler and the loss, so that
// their log-probabilities have the same bits: exponentials in float32 within a block of columns
// (LogitStatisticsArgs in cpu/cpu_kernels.h), blocks in float64, in ascending order.
#ifndef TANDEM_COMMON_KERNELS_LOGIT_BLOCKS_H_
#define TANDEM_COMMON_KERNELS_LOGIT_BLOCKS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tandem::kernels {

// Columns of a block; block b begins at column b * kLogitBlock.
inline constexpr int64_t kLogitBlock = 2048;

// The statistics of a row of logits z:
//   max = max_j z_j, sum = sum_j exp(z_j - max), weighted = sum_j exp(z_j - max) (z_j - max).
struct LogitRow {
  double max = 0.0, sum = 0.0, weighted = 0.0;
};

// Merges the statistics of the blocks b of a row, at max[b * stride] and so on, by the online
// softmax (https://arxiv.org/abs/1805.02867), extended by the weighted sum, from which the entropy
// follows. With M = max_b m_b and c_b = e^(m_b - M):
//   sum = sum_b c_b sum_b, weighted = sum_b c_b (weighted_b + (m_b - M) sum_b).
template <typename Number>
LogitRow MergeBlocks(const Number* max, const Number* sum, const Number* weighted, int64_t blocks,
                     int64_t stride) {
  LogitRow row = {.max = max[0]};
  for (int64_t b = 1; b < blocks; ++b) row.max = std::max<double>(row.max, max[b * stride]);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * stride;
    const double below = max[at] - row.max, factor = std::exp(below);
    row.sum += factor * sum[at];
    row.weighted += factor * (weighted[at] + below * sum[at]);
  }
  return row;
}

// Returns log softmax(z)_j for a logit z_j of the row.
inline double LogProb(double logit, const LogitRow& row) {
  return logit - row.max - std::log(row.sum);
}

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_LOGIT_BLOCKS_H_
