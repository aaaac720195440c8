// What a step reports about its batch and its loss (docs/metrics.md).
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_

#include <map>
#include <string>

#include "common/loss/policy_loss.h"
#include "common/tandem/author_selector.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

using Metrics = std::map<std::string, double>;

// Rewards, tokens, authorship. `sentence_ends` may be null: then there is no
// tandem/tokens_per_sent.
void AddBatchMetrics(const PolicyBatch& batch, const TokenSet* sentence_ends, Metrics& metrics);
void AddBatchMetrics(const SupervisedBatch& batch, Metrics& metrics);

// Losses, ratios, mismatch. mismatch/k1, k3 and max_abs_logprob_diff are of the tokens that the
// senior wrote, where the rollout's and the trainer's model are the same; mismatch/junior/... of
// those that the junior wrote.
void AddPolicyMetrics(const loss::PolicyMetrics& policy, Metrics& metrics);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_
