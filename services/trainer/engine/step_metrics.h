// What a step reports about its batch and its loss (docs/metrics.md).
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/loss/metric_reduction.h"
#include "common/loss/policy_loss.h"
#include "common/tandem/author_selector.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

using Metrics = std::map<std::string, double>;

// Rewards, tokens, authorship. `sentence_ends` may be null: then there is no
// tandem/tokens_per_sent.
void AddBatchMetrics(const PolicyBatch& batch, const TokenSet* sentence_ends, Metrics& metrics);
void AddBatchMetrics(const SupervisedBatch& batch, Metrics& metrics);

// The KL to the reference of each row, which is taken from the rewards.
void AddRewardKlMetrics(const std::vector<double>& kl, const PolicyBatch& batch, Metrics& metrics);

// Losses, ratios, mismatch of so many updates: losses are the mean of an update. mismatch/k1, k3
// and max_abs_logprob_diff are of the tokens that the senior wrote, where the rollout's and the
// trainer's model are the same; mismatch/junior/... of those that the junior wrote.
void AddPolicyMetrics(const loss::PolicyMetrics& policy, int64_t updates, Metrics& metrics);

// The auxiliary KL towards the junior.
struct JuniorKlSums {
  int64_t rows = 0;
  double kl = 0;    // nats, summed over the rows
  double loss = 0;  // as it enters the loss

  // Adds up the sums of evaluators of other rows, as PolicyLossEvaluator::Reduce.
  absl::Status Reduce(loss::MetricReduction reduce);
};

// After AddPolicyMetrics: the term is part of the loss.
void AddJuniorKlMetrics(const JuniorKlSums& junior_kl, int64_t updates, Metrics& metrics);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEP_METRICS_H_
