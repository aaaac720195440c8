#include "services/trainer/engine/auxiliary/critic_advantages.h"

#include <utility>

#include "absl/time/time.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"

namespace tandem::trainer {

absl::StatusOr<Advantages> CriticAdvantages(training::TrainingCore& core, CriticConnection& critic,
                                            const CallScope& call, const TrainStepRequest& request,
                                            const PolicyBatch& batch, const TokenNumbers& penalties,
                                            Metrics& metrics, double& seconds) {
  const CriticConnection::Call critic_call{
      .scope = call, .progress = [&core] { core.NoteProgress(); }, .blobs = request.blobs};
  CriticConnection::TrainRequest train;
  train.step = {.run_id = request.run_id, .step = request.step, .request_id = request.request_id};
  bool all_steps = true;
  for (const PolicySample& sample : batch.samples) {
    train.sequences.push_back({sample.trajectory.prompt_token_ids,
                               sample.trajectory.response_token_ids,
                               sample.trajectory.vision_inputs});
    std::vector<uint8_t>& mask = train.loss_masks.emplace_back();
    for (const Author author : sample.trajectory.authorship_mask) {
      mask.push_back(IsStep(batch.objective, author) ? 1 : 0);
      all_steps &= mask.back() == 1;
    }
  }
  if (all_steps) train.loss_masks.clear();
  const SteadyTime asked = SteadyTime::Now();
  TANDEM_ASSIGN_OR_RETURN(CriticConnection::Values values,
                          core.FromRankZero<CriticConnection::Values>([&] {
                            return critic.ComputeValues(critic_call, train.step, train.sequences);
                          }));
  seconds += absl::ToDoubleSeconds(SteadyTime::Now() - asked);
  TANDEM_ASSIGN_OR_RETURN(Advantages advantages, PolicyAdvantages(batch, &values, penalties));
  train.expected_version = values.weights.version;
  train.value_clip = batch.objective.value_clip;
  train.updates = batch.objective.updates;
  train.old_values = std::move(values.values);
  train.returns = advantages.returns;
  const SteadyTime taught = SteadyTime::Now();
  TANDEM_ASSIGN_OR_RETURN(const Metrics critic_metrics, core.FromRankZero<Metrics>([&] {
    return critic.TrainStep(critic_call, train);
  }));
  seconds += absl::ToDoubleSeconds(SteadyTime::Now() - taught);
  metrics.insert(critic_metrics.begin(), critic_metrics.end());
  return advantages;
}

}  // namespace tandem::trainer
