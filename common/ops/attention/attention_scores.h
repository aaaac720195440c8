// How attention scores keys.
#ifndef TANDEM_COMMON_OPS_ATTENTION_ATTENTION_SCORES_H_
#define TANDEM_COMMON_OPS_ATTENTION_ATTENTION_SCORES_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "common/kernels/attention_window.h"

namespace tandem::ops {

// The score of a query and a key is s = `scale` times their product, or soft_cap tanh(s / soft_cap)
// (https://arxiv.org/abs/2408.00118, section 2); keys outside of the row's window are hidden.
struct AttentionScores {
  int64_t window = kNoWindow;                  // attention_window.h
  std::optional<double> scale = std::nullopt;  // std::nullopt: 1 / sqrt(head_dim)
  std::optional<double> soft_cap = std::nullopt;

  double ScaleOf(int64_t head_dim) const {
    return scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  }
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_ATTENTION_SCORES_H_
