// From samples to the rows of the loss: what the model must read, which hidden states enter the
// loss, and every per-token number. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TRAINING_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "services/trainer/engine/engine.h"

namespace tandem::trainer {

// One sequence. Response token t is predicted by the hidden state at prompt + t - 1, so what comes
// after the last row is not read at all.
struct SequenceRows {
  std::vector<int64_t> input;      // tokens that the model reads; empty without rows
  std::vector<int64_t> positions;  // inside `input`
  std::vector<int64_t> labels;     // parallel to positions
};

struct TrainingRows {
  std::vector<SequenceRows> sequences;  // in the order of the samples
  // Of all rows, sequence after sequence.
  std::vector<double> temperatures;
  loss::PolicyTokens tokens;  // a supervised batch fills `scales` only

  // Index of each sequence's first row, and one past the last.
  std::vector<size_t> FirstRows() const;
};

// The rows of `response` whose `scales` are above 0 (empty scales: every token).
SequenceRows SelectSequenceRows(absl::Span<const int32_t> prompt,
                                absl::Span<const int32_t> response,
                                absl::Span<const double> scales);

// Weights of all response tokens and their scales over the global batch.
absl::StatusOr<loss::LossScales> PolicyScales(const PolicyBatch& batch);
absl::StatusOr<loss::LossScales> SupervisedScales(const SupervisedBatch& batch);

// Advantages of all response tokens, [S][L]. `values` only with GAE. Whitened if so configured.
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
