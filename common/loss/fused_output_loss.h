// Output layer and loss in one: what a trainer is given instead of logits, so that an
// implementation need not keep them.
#ifndef TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_
#define TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tandem::loss {

// Which hidden states enter the loss, and what they must predict. Rows without weight should not be
// listed: they cost as much as the others. (So no report can speak of them.)
struct OutputRows {
  std::vector<int64_t> positions;         // [N], rows of `hidden`; no position twice
  std::vector<int64_t> labels;            // [N], in [0, V)
  std::vector<double> temperatures = {};  // [N], or empty for 1 everywhere
};

// The rows of a sequence in the convention of Hugging Face: position t predicts labels[t + shift]
// (1 for a causal model), unless that is `ignore_index` or beyond the end.
OutputRows RowsOfLabels(absl::Span<const int64_t> labels, int64_t shift = 1,
                        int64_t ignore_index = -100);

// log-probability of the label and entropy (nats), per row.
struct RowLogProbs {
  std::vector<double> logprobs;
  std::vector<double> entropies;
};

// Called for consecutive runs of rows, each once and in order: given their log-probs and entropies
// it fills d loss / d logp and d loss / d entropy. An error ends the computation.
using TokenLoss = absl::Status(int64_t first_row, absl::Span<const double> logprobs,
                               absl::Span<const double> entropies,
                               absl::Span<double> logprob_coefficients,
                               absl::Span<double> entropy_coefficients);
using TokenLossFunction = absl::FunctionRef<TokenLoss>;

// Where gradients are *added*, on the device of the weight. An undefined tensor is not computed.
// fp32 (fp64 if the weight is); that of `hidden` may also have its type.
struct OutputGradients {
  at::Tensor hidden;  // [T, H]
  at::Tensor weight;  // [V, H], the main gradient of the head
  at::Tensor bias;    // [V]
};

// When logits turn into their gradient. N rows, H hidden, V vocabulary.
enum class LossMode {
  kAuto,               // the faster of the two within the budget
  kGradientInForward,  // chunk by chunk of rows, whose logits are kept: 6 N V H operations
  kRecompute,  // one call of the function for all rows, then the logits once more: 8 N V H, which a
               // loss of whole sequences needs and which takes the least memory
};

// Not thread-safe. Methods may throw c10::Error as libtorch does.
class FusedOutputLoss {
 public:
  virtual ~FusedOutputLoss() = default;

  // Loss of `rows` of `hidden` [T, H] through `function`, and its gradients. INVALID_ARGUMENT for
  // shapes or labels that do not fit; after an error the gradients hold an unusable partial sum.
  virtual absl::Status ForwardBackward(const at::Tensor& hidden, const OutputRows& rows,
                                       TokenLossFunction function, OutputGradients& gradients,
                                       LossMode mode = LossMode::kAuto) = 0;

  // The log-probabilities without any gradient.
  virtual absl::StatusOr<RowLogProbs> LogProbs(const at::Tensor& hidden,
                                               const OutputRows& rows) = 0;

  // The logits themselves, for inference: hidden [T, H] -> [T, V].
  virtual at::Tensor ForwardLogits(const at::Tensor& hidden) const = 0;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_
