#include "services/trainer/engine/steps/rollout_correction.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/base/errors/status_macros.h"
#include "common/loss/rollout_correction.h"

namespace tandem::trainer {
namespace {

// Removes the rows of rejected tokens.
absl::Status RejectTokens(const PolicyBatch& batch, TrainingRows& rows, Metrics& metrics) {
  const std::vector<uint8_t> kept = loss::KeptRows(batch.objective.rejection, rows.tokens);
  const auto all = static_cast<double>(kept.size());
  metrics["mismatch/rejected_fraction"] =
      kept.empty() ? 0 : static_cast<double>(std::count(kept.begin(), kept.end(), 0)) / all;
  const TokenNumbers weights = OfTokens(std::vector<double>(kept.begin(), kept.end()), batch, rows);
  TANDEM_ASSIGN_OR_RETURN(const loss::LossScales scales, PolicyScales(batch, weights));
  TrainingRows left = PolicyRows(batch, scales);
  for (std::vector<double> loss::PolicyTokens::*known :
       {&loss::PolicyTokens::old_logprobs, &loss::PolicyTokens::reference,
        &loss::PolicyTokens::importance_weights}) {
    const std::vector<double>& before = rows.tokens.*known;
    if (!before.empty()) left.tokens.*known = OfRows(OfTokens(before, batch, rows), batch, left);
  }
  rows = std::move(left);
  return absl::OkStatus();
}

}  // namespace

absl::Status CorrectForRollout(const PolicyBatch& batch, TrainingRows& rows, Metrics& metrics) {
  const PolicyObjective& objective = batch.objective;
  const bool rejects = RejectsTokens(objective);
  // The mean of importance weights is over all tokens with a weight, rejected ones too.
  if (objective.loss.importance_sampling_cap > 0 &&
      (rejects || objective.importance_sampling_batch_normalize)) {
    rows.tokens.importance_weights = loss::ImportanceWeights(
        objective.loss, rows.tokens, objective.importance_sampling_batch_normalize);
  }
  return rejects ? RejectTokens(batch, rows, metrics) : absl::OkStatus();
}

}  // namespace tandem::trainer
