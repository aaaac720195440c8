// The loss of a speculator: the sum over its heads of the mean cross-entropy of the head's targets
// (speculator_rows.h). The logits of a head never exist as a whole: each is the output layer of a
// fused loss (common/loss/logits/linear_cross_entropy.h).
#ifndef TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_LOSS_H_
#define TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/speculator/adapters/speculator_rows.h"
#include "common/speculator/speculator.h"

namespace tandem::speculator {

struct SpeculatorBatch {
  // [T, d], the language model's last hidden states after the final norm. Gradients flow into them
  // if they require any.
  at::Tensor hidden;
  at::Tensor tokens;                      // [T] int64, on the device of `hidden`
  std::vector<SequenceTokens> sequences;  // packed or padded
  std::vector<int64_t> labels;            // [T], token ids or kIgnoredLabel
};

struct SpeculatorLossOptions {
  // Factor of the gradients, positive.
  double coefficient = 1;
  // The number of targets of each head in the whole batch, where a call has a micro-batch of it:
  // means divide by it, so that losses and gradients of the micro-batches add up. Empty: the batch
  // is whole.
  std::vector<int64_t> target_counts = {};
  loss::LinearCrossEntropyOptions output_loss = {};
};

struct HeadReport {
  double loss = 0;      // mean over the targets; 0 if there are none
  int64_t targets = 0;  // of this call
  int64_t correct = 0;  // targets with the greatest logit
};

struct SpeculatorLossReport {
  double loss = 0;  // sum over the heads, without the coefficient
  std::vector<HeadReport> heads;
};

// Throw c10::Error as libtorch does. INVALID_ARGUMENT that names the field of the batch or of the
// options; NotFiniteError (common/base/errors/not_finite.h) for logits that are not finite.
class SpeculatorLoss {
 public:
  // `speculator` must outlive this.
  explicit SpeculatorLoss(const Speculator& speculator, SpeculatorLossOptions options = {});

  // Computes the loss and adds its gradients to those of the speculator's parameters, and of
  // `batch.hidden` if it requires any. FAILED_PRECONDITION if the speculator does not train. After
  // another error the gradients may hold an unusable partial sum.
  absl::StatusOr<SpeculatorLossReport> ForwardBackward(const SpeculatorBatch& batch) const;

  // Computes the loss alone.
  absl::StatusOr<SpeculatorLossReport> Evaluate(const SpeculatorBatch& batch) const;

 private:
  absl::Status Check(const SpeculatorBatch& batch) const;
  absl::StatusOr<SpeculatorLossReport> Run(const SpeculatorBatch& batch, bool backward) const;
  // Returns the report of a head, and sets `state_gradient` if it is not nullptr.
  absl::StatusOr<HeadReport> RunHead(int64_t head, const at::Tensor& state,
                                     const loss::OutputRows& targets,
                                     at::Tensor* state_gradient) const;
  // Returns the factor of a target in the mean of its head.
  absl::StatusOr<double> Scale(int64_t head, int64_t targets) const;

  const Speculator& speculator_;
  const SpeculatorLossOptions options_;
};

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_LOSS_H_
