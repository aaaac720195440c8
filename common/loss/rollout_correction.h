// Corrections for a rollout whose probabilities differ from the trainer's, beyond an importance
// weight per token: rejection of tokens, and weights with the mean 1. Kinds and names are verl's
// (richardli.xyz/rl-collapse).
#ifndef TANDEM_COMMON_LOSS_ROLLOUT_CORRECTION_H_
#define TANDEM_COMMON_LOSS_ROLLOUT_CORRECTION_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/loss/policy_loss.h"

namespace tandem::loss {

// Whether a token is rejected by its own statistic, or by one of its sequence's rows.
enum class RejectionLevel { kToken, kSequenceSum, kSequenceMean, kSequenceMax };

// With x = logp_old - log q of a row (q as in PolicyLossOptions), clamped to +-kMaxLogRatio, the
// statistic is k1 = -x, k2 = x^2 / 2 or k3 = exp(x) - x - 1.
struct RejectionOptions {
  RejectionLevel level = RejectionLevel::kToken;
  KlEstimator estimator = KlEstimator::kK1;  // k1, k2 or k3
  // Rows with a k2 or k3 of at most `upper` are kept; of k1, those with exp(k1) in [lower, upper].
  // An upper of 0 is off.
  double upper = 0;
  double lower = 0;

  bool operator==(const RejectionOptions&) const = default;
};

// INVALID_ARGUMENT "rejection_...".
absl::Status CheckRejectionOptions(const RejectionOptions& options);

// Returns 1 for rows that are kept, else 0, [N]. Needs old_logprobs, behaviour and sequence_rows.
std::vector<uint8_t> KeptRows(const RejectionOptions& options, const PolicyTokens& tokens);

// Returns the bounded importance weights of the rows, [N]. `normalize` divides them by their mean
// over rows, or over sequences that have rows, as importance_sampling_level says. Needs the same
// vectors as KeptRows.
std::vector<double> ImportanceWeights(const PolicyLossOptions& options, const PolicyTokens& tokens,
                                      bool normalize);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_ROLLOUT_CORRECTION_H_
