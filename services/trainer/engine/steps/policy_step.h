// One policy step (GRPO, PPO and their relatives), from a batch of trajectories to the gradients of
// its updates.
//
// Strategies run models and know no losses; losses know no micro-batches, ranks or logits. So a
// step is four nested callbacks. The gradient of the hidden states is all that an inner callback
// returns for the model:
//
//   TrainingCore::Step                       once per step
//   │ └► (1) prepare: PolicyStep::Prepare    checks, log-probabilities, advantages
//   │        returns one UpdateGradients per mini-batch and epoch
//   │
//   │ └► (2) UpdateGradients: PolicyStep::AddUpdate     once per update
//   │        AddGradients (row_passes.h) ─► TrainingCore::ForwardBackward ─► Strategy
//   │
//   │        └► (3) RowLoss: in AddGradients            once per micro-batch
//   │               hidden states [T, H] ─► LinearCrossEntropyLoss ─► d hidden [T, H]
//   │
//   │               └► (4) TokenLoss: PolicyLossEvaluator::Evaluate    once per run of rows
//   │                      log-probability and entropy of each row ─► its two coefficients
//   │
//   └─ Strategy::OptimizerStep               after each update
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_POLICY_STEP_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_POLICY_STEP_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/loss/policy_loss.h"
#include "common/steps/mini_batches.h"
#include "services/trainer/engine/auxiliary/critic_connection.h"
#include "services/trainer/engine/auxiliary/trainer_models.h"
#include "services/trainer/engine/steps/batch_check.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/teacher.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// The policy step of one request. Must live as long as the updates that Prepare returns, and the
// constructor's arguments longer.
class PolicyStep {
 public:
  using Updates = std::vector<training::TrainingCore::UpdateGradients>;

  // `batch` is the request's; `critic` may be null where `limits` say that there is none.
  PolicyStep(TrainerModels& models, CriticConnection* critic, const BatchLimits& limits,
             const TrainStepRequest& request, const PolicyBatch& batch)
      : models_(models), critic_(critic), limits_(limits), request_(request), batch_(&batch) {}
  PolicyStep(const PolicyStep&) = delete;
  PolicyStep& operator=(const PolicyStep&) = delete;

  // Checks the batch, computes all that must precede the first update, and returns the updates: the
  // `prepare` of TrainingCore::Step. Marks the step as skipped if nothing is left to learn.
  absl::StatusOr<Updates> Prepare(const CallScope& call, StepReport& report);
  // Seconds in which Prepare waited for the critic; 0 without one.
  double critic_seconds() const { return critic_seconds_; }

 private:
  // Checks the images of all samples, and that the models beside the senior read them, too.
  absl::Status CheckImages() const;
  // Drops samples that are too old, if the objective says so, and reports their number.
  void DropStaleSamples(StepReport& report);
  // Adds the log-probabilities that must be known before the first update.
  absl::Status AddLogProbs();
  absl::Status AddAdvantages(const CallScope& call, Metrics& metrics);
  absl::Status MakeEvaluator();
  bool HasRows(const training::MiniBatch& range) const;
  // Leaves the gradients of one update with the strategy.
  absl::Status AddUpdate(const training::MiniBatch& range, StepReport& report);

  const PolicyObjective& objective() const { return batch_->objective; }
  Teacher teacher() const { return TeacherOf(objective(), models_.junior.get()); }

  TrainerModels& models_;
  CriticConnection* const critic_;
  const BatchLimits limits_;
  const TrainStepRequest& request_;
  std::optional<PolicyBatch> fresh_;  // the batch without samples that are too old
  const PolicyBatch* batch_;          // the samples that are learnt
  TrainingRows rows_;
  // The sums of the updates so far.
  std::optional<loss::PolicyLossEvaluator> evaluator_;
  TeacherKlSums teacher_kl_;
  DistillationSums distillation_;
  training::RouterSums routers_;
  double router_loss_ = 0;
  int64_t updates_ = 0;
  double critic_seconds_ = 0;
  // The mismatch that the first update saw, with the weights that the step began with.
  std::optional<StepMismatch> initial_mismatch_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_POLICY_STEP_H_
