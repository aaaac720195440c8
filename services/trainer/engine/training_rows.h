// From samples to the rows of the loss: what the model must read, which hidden states enter the
// loss, and every per-token number. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "common/training/mini_batches.h"
#include "services/trainer/engine/critic_connection.h"
#include "services/trainer/engine/types.h"
#include "services/training/sequence_rows.h"

namespace tandem::trainer {

// The junior-written tokens of the auxiliary KL; empty without one.
struct JuniorRows {
  std::vector<training::SequenceRows> sequences;  // with the inputs of TrainingRows::sequences
  // Of all rows, sequence after sequence.
  std::vector<double> temperatures;
  std::vector<double> logprobs;  // the junior's own, as recorded
  std::vector<double> scales;    // coefficient / rows of the mini-batch
};

struct TrainingRows {
  std::vector<training::SequenceRows> sequences;  // in the order of the samples
  // Of all rows, sequence after sequence.
  std::vector<double> temperatures;
  loss::PolicyTokens tokens;  // a supervised batch fills `scales` only
  JuniorRows junior = {};
};

// The samples of each update that goes through the batch once.
std::vector<training::MiniBatch> MiniBatches(const PolicyBatch& batch);

// Numbers of all response tokens, [S][L].
using TokenNumbers = std::vector<std::vector<double>>;

// Weights of all response tokens and their scales, each over its mini-batch. Tokens whose `kept`
// (or empty) is 0 have no weight.
absl::StatusOr<loss::LossScales> PolicyScales(const PolicyBatch& batch,
                                              const TokenNumbers& kept = {});
absl::StatusOr<loss::LossScales> SupervisedScales(const SupervisedBatch& batch);

// Advantages of all response tokens. `values` only with GAE, `penalties` (or empty) are subtracted
// from the rewards of their tokens. Whitened if so configured. Junior tokens that are skipped have
// the advantage 0 and their value as the return.
struct Advantages {
  TokenNumbers advantages;
  std::vector<std::vector<float>> returns;  // with GAE: what the critic learns
};
absl::StatusOr<Advantages> PolicyAdvantages(const PolicyBatch& batch,
                                            const CriticConnection::Values* values,
                                            const TokenNumbers& penalties = {});

// Needs a checked batch. All but the advantages, and what the models of the trainer are asked for.
TrainingRows PolicyRows(const PolicyBatch& batch, const loss::LossScales& scales);

// Numbers of the rows from those of all tokens, and back: 0 where there is no row.
std::vector<double> OfRows(const TokenNumbers& numbers, const PolicyBatch& batch,
                           const TrainingRows& rows);
TokenNumbers OfTokens(const std::vector<double>& numbers, const PolicyBatch& batch,
                      const TrainingRows& rows);

// The KL to the reference of every row. Needs its old and reference log-probabilities.
std::vector<double> ReferenceKl(const PolicyObjective& objective, const loss::PolicyTokens& tokens);

TrainingRows SupervisedRows(const SupervisedBatch& batch, const loss::LossScales& scales);

// The divisor of the logits of a trajectory: greedy sampling records log-probs at temperature 1.
double LogProbTemperature(const Trajectory& trajectory);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_
