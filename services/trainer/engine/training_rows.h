// From samples to the rows of the loss: what the model must read, which hidden states enter the
// loss, and every per-token number. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "services/trainer/engine/critic_connection.h"
#include "services/trainer/engine/types.h"
#include "services/training/sequence_rows.h"

namespace tandem::trainer {

struct TrainingRows {
  std::vector<training::SequenceRows> sequences;  // in the order of the samples
  // Of all rows, sequence after sequence.
  std::vector<double> temperatures;
  loss::PolicyTokens tokens;  // a supervised batch fills `scales` only
};

// Weights of all response tokens and their scales over the global batch.
absl::StatusOr<loss::LossScales> PolicyScales(const PolicyBatch& batch);
absl::StatusOr<loss::LossScales> SupervisedScales(const SupervisedBatch& batch);

// Advantages of all response tokens, [S][L]. `values` only with GAE. Whitened if so configured.
// Junior tokens that are skipped have the advantage 0 and their value as the return.
struct Advantages {
  std::vector<std::vector<double>> advantages;
  std::vector<std::vector<float>> returns;  // with GAE: what the critic learns
};
absl::StatusOr<Advantages> PolicyAdvantages(const PolicyBatch& batch,
                                            const CriticConnection::Values* values);

// Needs a checked batch.
TrainingRows PolicyRows(const PolicyBatch& batch, const loss::LossScales& scales,
                        const std::vector<std::vector<double>>& advantages);
TrainingRows SupervisedRows(const SupervisedBatch& batch, const loss::LossScales& scales);

// The divisor of the logits of a trajectory: greedy sampling records log-probs at temperature 1.
double LogProbTemperature(const Trajectory& trajectory);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_
