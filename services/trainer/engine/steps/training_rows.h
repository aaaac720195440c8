// The rows of the loss, made from samples: the tokens that the model reads, the hidden states that
// enter the loss, and all per-token numbers. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TRAINING_ROWS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TRAINING_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "common/steps/mini_batches.h"
#include "services/trainer/engine/auxiliary/critic_connection.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/sequence_rows.h"

namespace tandem::trainer {

// The tokens that a teacher teaches; empty without one.
struct TaughtRows {
  training::SequenceBatch sequences;  // with the inputs of TrainingRows::sequences
  // One number per row.
  std::vector<double> temperatures;
  std::vector<double> logprobs;  // the author's, as the rollout recorded them
  std::vector<double> scales;    // coefficient / number of rows of the mini-batch
};

// The teachers' distributions over the rows of the loss; empty without distillation.
struct DistillationRows {
  // One number per row.
  std::vector<double> temperatures;
  std::vector<double> scales;      // factor of the divergence in the loss
  std::vector<int32_t> teachers;   // index of the teacher in `names`
  std::vector<std::string> names;  // of the batch's teachers, sorted
  TopTokens top_tokens;            // of each row; none where the trainer's model is the teacher
};

struct TrainingRows {
  training::SequenceBatch sequences;  // in the order of the samples
  // All tokens of each sequence: its prompt and its response.
  std::vector<std::vector<int64_t>> texts;
  std::vector<double> temperatures;  // one per row
  loss::PolicyTokens tokens;         // a supervised batch fills `scales` only
  TaughtRows taught = {};
  DistillationRows distillation = {};

  bool has_taught() const { return !taught.sequences.sequences().empty(); }
};

// Whether the sample is left out of the loss because its response was cut by length.
bool IsMasked(const PolicySample& sample, const PolicyObjective& objective);

// Returns the mini-batches of one epoch.
std::vector<training::MiniBatch> MiniBatches(const PolicyBatch& batch);

// One value per response token, indexed [sample][token].
using TokenNumbers = std::vector<std::vector<double>>;

// Return the weights of all response tokens and their scales, which are relative to the mini-batch.
// A token has no weight where `kept`, unless it is empty, is 0.
absl::StatusOr<loss::LossScales> PolicyScales(const PolicyBatch& batch,
                                              const TokenNumbers& kept = {});
absl::StatusOr<loss::LossScales> SupervisedScales(const SupervisedBatch& batch);

// Returns the advantages of all response tokens, whitened if so configured. `values` are given with
// GAE alone; `penalties`, unless empty, are subtracted from the rewards of their tokens. Skipped
// junior tokens have the advantage 0, and their value as the return.
struct Advantages {
  TokenNumbers advantages;
  std::vector<std::vector<float>> returns;  // with GAE: the critic's targets
};
absl::StatusOr<Advantages> PolicyAdvantages(const PolicyBatch& batch,
                                            const CriticConnection::Values* values,
                                            const TokenNumbers& penalties = {});

// Returns the rows of a checked batch, without advantages and without log-probabilities that the
// trainer's models compute.
TrainingRows PolicyRows(const PolicyBatch& batch, const loss::LossScales& scales);

// Select the numbers of the rows from those of all tokens, and spread them again, with 0 where
// there is no row.
std::vector<double> OfRows(const TokenNumbers& numbers, const PolicyBatch& batch,
                           const TrainingRows& rows);
TokenNumbers OfTokens(const std::vector<double>& numbers, const PolicyBatch& batch,
                      const TrainingRows& rows);

// Returns the KL to the reference of every row, from its old and reference log-probabilities.
std::vector<double> ReferenceKl(const PolicyObjective& objective, const loss::PolicyTokens& tokens);

// Returns the rows of the tokens whose scale is not 0, or of all tokens if every scale is.
TrainingRows SupervisedRows(const SupervisedBatch& batch, const loss::LossScales& scales);

// Returns the divisor of a trajectory's logits. Greedy sampling records log-probs at temperature 1.
double LogProbTemperature(const Trajectory& trajectory);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TRAINING_ROWS_H_
