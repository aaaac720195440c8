// The metrics of a step: of its batch, its loss and its mismatch with the rollout
// (docs/reference/metrics.md).
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_STEP_METRICS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_STEP_METRICS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/coauthoring/author_selector.h"
#include "common/loss/metric_reduction.h"
#include "common/loss/policy_loss.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

using Metrics = std::map<std::string, double>;

// Adds rewards, numbers of tokens and authorship. Without `sentence_ends` (null) there is no
// tandem/tokens_per_sent.
void AddBatchMetrics(const PolicyBatch& batch, const TokenSet* sentence_ends, Metrics& metrics);
void AddBatchMetrics(const SupervisedBatch& batch, Metrics& metrics);

// Adds the KL to the reference that is subtracted from the rewards; `kl` has one number per row.
void AddRewardKlMetrics(const std::vector<double>& kl, const PolicyBatch& batch, Metrics& metrics);

// Adds losses and ratios of `updates` updates; a loss is the mean over the updates. `has_kl` is
// whether the KL to the reference is part of the loss.
void AddPolicyMetrics(const loss::PolicyMetrics& policy, int64_t updates, bool has_kl,
                      Metrics& metrics);

// How far the trainer's log-probabilities are from the rollout's before the first update of a step.
struct StepMismatch {
  loss::Mismatch senior;  // of tokens that the senior wrote: both sides are the same model
  loss::Mismatch junior;  // of tokens that the junior wrote
};

// Adds mismatch/... for the senior's tokens and mismatch/junior/... for the junior's, where there
// are any.
void AddMismatchMetrics(const StepMismatch& mismatch, Metrics& metrics);

// Sums of the KL towards a teacher.
struct TeacherKlSums {
  int64_t rows = 0;
  double kl = 0;    // nats, summed over the rows
  double loss = 0;  // as it enters the loss

  // Adds up the sums of all ranks, as PolicyLossEvaluator::Reduce.
  absl::Status Reduce(loss::MetricReduction reduce);
};

// Adds the KL towards the junior to the metrics and to their loss. Follows AddPolicyMetrics.
void AddJuniorKlMetrics(const TeacherKlSums& teacher_kl, int64_t updates, Metrics& metrics);

// Sums of the divergence from teachers.
struct DistillationSums {
  struct OfTeacher {
    int64_t rows = 0;
    double divergence = 0;  // nats, summed over the rows
  };

  double loss = 0;  // as it enters the loss
  // Mass outside of the teacher's likeliest tokens, summed over the rows of samples that bring
  // them.
  double teacher_rest = 0, student_rest = 0;
  std::vector<OfTeacher> teachers;  // in the order of DistillationRows::names

  // As TeacherKlSums::Reduce.
  absl::Status Reduce(loss::MetricReduction reduce);
};

// Adds loss/distillation and distillation/... to the metrics, and the first to loss/total. Follows
// what sets loss/total.
void AddDistillationMetrics(const DistillationSums& sums, const DistillationRows& rows,
                            int64_t updates, Metrics& metrics);

// Adds router/... and `loss`, which the routers add to the loss, as a mean over the updates.
// Follows what sets loss/total.
void AddRouterMetrics(const training::RouterSums& routers, double loss, Metrics& metrics);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_STEP_METRICS_H_
