#include "common/loss/supervised_loss.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/not_finite.h"

namespace tandem::loss {

absl::Status SupervisedLossEvaluator::Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                                               absl::Span<const double> entropies,
                                               absl::Span<double> logprob_coefficients,
                                               absl::Span<double> entropy_coefficients) {
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const size_t t = static_cast<size_t>(first_row) + i;
    if (!std::isfinite(logprobs[i])) {
      return NotFiniteError(absl::StrCat("the log-prob of row ", t, " is not finite"));
    }
    logprob_coefficients[i] = -scales_[t];
    entropy_coefficients[i] = 0;
    loss_ -= scales_[t] * logprobs[i];
    entropy_ += entropies[i];
    ++tokens_;
  }
  return absl::OkStatus();
}

absl::Status SupervisedLossEvaluator::Reduce(MetricReduction reduce) {
  return ReduceMetrics(reduce, {&loss_, &entropy_, &tokens_}, {});
}

}  // namespace tandem::loss
