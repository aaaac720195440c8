#include "common/loss/loss_scale.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::loss {
namespace {

// Bounds far beyond the lengths of responses, within which no scale overflows.
constexpr double kMinNormConstant = 1e-9;
constexpr double kMaxNormConstant = 1e9;

double CountOf(Normalizer normalizer, double weight) {
  switch (normalizer) {
    case Normalizer::kAllTokens:
      return 1.0;
    case Normalizer::kNonzeroWeight:
      return weight > 0 ? 1.0 : 0.0;
    case Normalizer::kSumOfWeights:
      return weight;
  }
  return 0.0;
}

}  // namespace

absl::Status CheckLossScaleOptions(const LossScaleOptions& options) {
  if (options.norm_constant != 0) {
    return CheckInRange("norm_constant", options.norm_constant, kMinNormConstant, kMaxNormConstant);
  }
  if (options.aggregation == Aggregation::kSeqMeanTokenSumNorm) {
    return InvalidField("norm_constant", "must be positive with SEQ_MEAN_TOKEN_SUM_NORM");
  }
  return absl::OkStatus();
}

absl::StatusOr<LossScales> ComputeLossScales(const LossScaleOptions& options,
                                             absl::Span<const double> weights,
                                             absl::Span<const int64_t> sequence_lengths) {
  TANDEM_RETURN_IF_ERROR(CheckLossScaleOptions(options));
  LossScales result;
  result.scales.assign(weights.size(), 0.0);
  double total_count = 0;
  std::vector<double> counts(sequence_lengths.size(), 0.0);
  size_t t = 0;
  for (size_t s = 0; s < sequence_lengths.size(); ++s) {
    if (sequence_lengths[s] < 0 || static_cast<size_t>(sequence_lengths[s]) > weights.size() - t) {
      return InvalidField("sequence_lengths", "do not add up to the number of weights");
    }
    const size_t end = t + static_cast<size_t>(sequence_lengths[s]);
    for (; t < end; ++t) {
      if (!std::isfinite(weights[t]) || weights[t] < 0) {
        return InvalidField(absl::StrCat("weights[", t, "]"), "must be finite and not negative");
      }
      counts[s] += CountOf(options.normalizer, weights[t]);
      result.total_weight += weights[t];
    }
    total_count += counts[s];
    result.counted_sequences += counts[s] > 0;
  }
  if (t != weights.size()) {
    return InvalidField("sequence_lengths", "do not add up to the number of weights");
  }
  t = 0;
  const auto sequences = static_cast<double>(result.counted_sequences);
  for (size_t s = 0; s < sequence_lengths.size(); ++s) {
    const size_t end = t + static_cast<size_t>(sequence_lengths[s]);
    double divisor = 0;
    switch (options.aggregation) {
      case Aggregation::kTokenMean:
        divisor = total_count;
        break;
      case Aggregation::kTokenSum:
        divisor = 1.0;
        break;
      case Aggregation::kSeqMeanTokenSum:
        divisor = sequences;
        break;
      case Aggregation::kSeqMeanTokenMean:
        divisor = sequences * counts[s];
        break;
      case Aggregation::kSeqMeanTokenSumNorm:
        divisor = sequences * options.norm_constant;
        break;
    }
    for (; t < end; ++t) {
      if (weights[t] > 0 && divisor > 0) result.scales[t] = weights[t] / divisor;
    }
  }
  return result;
}

}  // namespace tandem::loss
