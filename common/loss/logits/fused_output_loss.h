// The contract of a fused output loss: the output layer and the loss in one, so that the [N, V]
// logits of N rows and V tokens need not exist as a whole. A loss takes rows of hidden states,
// calls a function for the derivatives of each row, and adds to the gradients.
// LinearCrossEntropyLoss is the loss of one layer, LinearDivergenceLoss compares two.
#ifndef TANDEM_COMMON_LOSS_LOGITS_FUSED_OUTPUT_LOSS_H_
#define TANDEM_COMMON_LOSS_LOGITS_FUSED_OUTPUT_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace tandem::loss {

// The hidden states that enter the loss, and the tokens that they must predict. Rows without weight
// should be left out: they cost as much as the others, and no report mentions them.
struct OutputRows {
  std::vector<int64_t> positions;         // [N], rows of `hidden`; no position twice
  std::vector<int64_t> labels;            // [N], in [0, V)
  std::vector<double> temperatures = {};  // [N], or empty for 1 everywhere
};

// Log-probability of the label and entropy (nats) of every row.
struct RowLogProbs {
  std::vector<double> logprobs;
  std::vector<double> entropies;
  int64_t num_greatest = 0;  // rows whose label has the greatest logit
};

// Called for consecutive runs of rows, once for each row and in order: reads their log-probs and
// entropies and fills d loss / d logp and d loss / d entropy. An error ends the computation.
using TokenLoss = absl::Status(int64_t first_row, absl::Span<const double> logprobs,
                               absl::Span<const double> entropies,
                               absl::Span<double> logprob_coefficients,
                               absl::Span<double> entropy_coefficients);
using TokenLossFunction = absl::FunctionRef<TokenLoss>;

// Tensors on the device of the weight that gradients are *added* to, in fp32 (fp64 if the weight
// is); the gradient of `hidden` may also have the type of `hidden`. The gradient of an undefined
// tensor is not computed.
struct OutputGradients {
  at::Tensor hidden = {};  // [T, H]
  at::Tensor weight = {};  // [V, H], the main gradient of the head
};

// When logits turn into their gradient. N rows, H hidden, V vocabulary.
enum class LossMode {
  // kRecompute where the CPU multiplies so fast that this takes less time
  // (ProductKernel::prefers_recompute), or where the budget holds few rows; else
  // kGradientInForward.
  kAuto,
  // Keeps the logits of a chunk of rows: 6 N V H operations.
  kGradientInForward,
  // Computes logits twice: 8 N V H operations. Calls the function once for all rows, which a loss
  // of whole sequences needs. Takes the least memory.
  kRecompute,
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_FUSED_OUTPUT_LOSS_H_
