#include "common/loss/rollout_correction.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::loss {
namespace {

// Returns the statistic of a sequence.
double SequenceStatistic(RejectionLevel level, absl::Span<const double> rows) {
  if (level == RejectionLevel::kSequenceMax) return *std::max_element(rows.begin(), rows.end());
  const double sum = std::accumulate(rows.begin(), rows.end(), 0.0);
  return level == RejectionLevel::kSequenceSum ? sum : sum / static_cast<double>(rows.size());
}

bool IsKept(const RejectionOptions& options, double statistic) {
  if (options.estimator != KlEstimator::kK1) return statistic <= options.upper;
  return statistic >= std::log(options.lower) && statistic <= std::log(options.upper);
}

}  // namespace

absl::Status CheckRejectionOptions(const RejectionOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckInRange("rejection_upper", options.upper, 0, kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(CheckInRange("rejection_lower", options.lower, 0, options.upper));
  const bool k1 = options.estimator == KlEstimator::kK1;
  if (!k1 && options.estimator != KlEstimator::kK2 && options.estimator != KlEstimator::kK3) {
    return InvalidField("rejection_estimator", "must be K1, K2 or K3: it has no gradient");
  }
  if (!k1 && options.lower > 0) {
    return InvalidField("rejection_lower", "must be 0 with K2 and K3, which are never negative");
  }
  if (k1 && options.level == RejectionLevel::kSequenceMax) {
    return InvalidField("rejection_estimator", "must be K2 or K3 with SEQUENCE_MAX");
  }
  return absl::OkStatus();
}

std::vector<uint8_t> KeptRows(const RejectionOptions& options, const PolicyTokens& tokens) {
  std::vector<double> statistics;
  for (size_t row = 0; row < tokens.old_logprobs.size(); ++row) {
    statistics.push_back(KlEstimate(options.estimator, /*k3_cap=*/0,
                                    /*logprob=*/-LogImportanceWeight(tokens, row),
                                    /*reference=*/0));
  }
  std::vector<uint8_t> kept;
  for (const int64_t count : tokens.sequence_rows) {
    const auto rows =
        absl::MakeConstSpan(statistics).subspan(kept.size(), static_cast<size_t>(count));
    if (rows.empty()) continue;
    const bool by_token = options.level == RejectionLevel::kToken;
    const double whole = by_token ? 0 : SequenceStatistic(options.level, rows);
    for (const double own : rows) kept.push_back(IsKept(options, by_token ? own : whole));
  }
  return kept;
}

std::vector<double> ImportanceWeights(const PolicyLossOptions& options, const PolicyTokens& tokens,
                                      bool normalize) {
  const bool by_token = options.importance_sampling_level == ImportanceSamplingLevel::kToken;
  std::vector<double> weights;
  double sum = 0, count = 0;
  for (const int64_t rows : tokens.sequence_rows) {
    if (rows == 0) continue;
    std::vector<double> logs;
    for (int64_t i = 0; i < rows; ++i) {
      logs.push_back(LogImportanceWeight(tokens, weights.size() + static_cast<size_t>(i)));
    }
    const double whole =
        BoundedImportanceWeight(options, std::accumulate(logs.begin(), logs.end(), 0.0));
    for (const double own : logs) {
      weights.push_back(by_token ? BoundedImportanceWeight(options, own) : whole);
      if (by_token) sum += weights.back();
    }
    if (!by_token) sum += whole;
    count += by_token ? static_cast<double>(rows) : 1;
  }
  if (!normalize || sum == 0) return weights;
  for (double& weight : weights) weight *= count / sum;
  return weights;
}

}  // namespace tandem::loss
