// Cross-entropy on given labels (SFT), as a function for the fused output loss.
#ifndef TANDEM_COMMON_LOSS_SUPERVISED_LOSS_H_
#define TANDEM_COMMON_LOSS_SUPERVISED_LOSS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/loss/metric_reduction.h"

namespace tandem::loss {

// loss = -sum_t scale_t * logp_t.
class SupervisedLossEvaluator {
 public:
  // `scales` [N] (loss_scale.h) must outlive the evaluator.
  explicit SupervisedLossEvaluator(absl::Span<const double> scales) : scales_(scales) {}

  // Like PolicyLossEvaluator::Evaluate. NotFiniteError for a log-prob.
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                        absl::Span<const double> entropies, absl::Span<double> logprob_coefficients,
                        absl::Span<double> entropy_coefficients);

  double loss() const { return loss_; }
  double mean_entropy() const { return tokens_ == 0 ? 0 : entropy_ / static_cast<double>(tokens_); }
  int64_t tokens() const { return tokens_; }

  // Like PolicyLossEvaluator::Reduce, for these three numbers.
  absl::Status Reduce(MetricReduction reduce);

 private:
  absl::Span<const double> scales_;
  double loss_ = 0, entropy_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_SUPERVISED_LOSS_H_
