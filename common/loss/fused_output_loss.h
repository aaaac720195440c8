// Output layer and loss in one, without the [N, V] logits.
//
// N rows, H hidden, V vocabulary; z = (h W^T + b) / temperature, p = softmax(z), y the label.
// A token-level loss needs of z only logp = z_y - L and entropy = L - sum_j p_j z_j with
// L = logsumexp(z), and answers with c = d loss / d logp and e = d loss / d entropy. Then
//   dz_j = (c (1[j = y] - p_j) - e p_j (z_j - sum_k p_k z_k)) / temperature.
// Gradient in forward: per chunk of rows the logits are computed once, overwritten by dz, and
// multiplied into d hidden and d weight. Three GEMMs, one chunk of memory. The idea is from Liger
// (arXiv 2410.10989) and cut cross-entropy (2411.09009).
#ifndef TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_
#define TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
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

// log-probability of the label and entropy (nats), per row.
struct RowStatistics {
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

// What a trainer is given instead of logits, so that an implementation need not keep them. Not
// thread-safe.
class FusedOutputLoss {
 public:
  virtual ~FusedOutputLoss() = default;

  // Loss of `rows` of `hidden` [T, H] through `function`, and its gradients. INVALID_ARGUMENT for
  // shapes or labels that do not fit; after an error the gradients hold an unusable partial sum.
  virtual absl::Status ForwardBackward(const at::Tensor& hidden, const OutputRows& rows,
                                       TokenLossFunction function, OutputGradients& gradients) = 0;

  // The same statistics without any gradient.
  virtual absl::StatusOr<RowStatistics> LogProbs(const at::Tensor& hidden,
                                                 const OutputRows& rows) = 0;
};

enum class LossImpl {
  kAuto,          // the best that is available
  kCce,           // own tiled kernels; not there yet
  kTorchCompile,  // one GEMM with a fused epilogue; not there yet
  kPytorch,       // ATen operations, chunk by chunk
};

struct LinearCrossEntropyOptions {
  LossImpl impl = LossImpl::kAuto;
  int64_t chunk_size = 4096;  // most rows a chunk
  // Bound of all memory of size V: logits of a chunk and the workspace of its rows. Decides the
  // rows of a chunk together with chunk_size. At least two rows' worth.
  int64_t logits_chunk_bytes = 64 << 20;
};

class LinearCrossEntropyLoss : public FusedOutputLoss {
 public:
  // `weight` [V, H] and `bias` [V] (or undefined) are those of the output layer, shared,
  // contiguous, on any device: float32, float64 or bfloat16 (`bias` float32 then). Hidden states
  // have the type of the weight, or bfloat16 where it is float32. Logits are accumulated and kept
  // in float32 (float64 if the weight is). On a GPU a chunk of rows costs one wait for the device.
  // INVALID_ARGUMENT for shapes and options, UNIMPLEMENTED for other types.
  static absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> Create(
      at::Tensor weight, at::Tensor bias = {}, const LinearCrossEntropyOptions& options = {});

  absl::Status ForwardBackward(const at::Tensor& hidden, const OutputRows& rows,
                               TokenLossFunction function, OutputGradients& gradients) override;
  absl::StatusOr<RowStatistics> LogProbs(const at::Tensor& hidden, const OutputRows& rows) override;

  // What runs, and why if that is not what was asked for (empty otherwise): log it once.
  LossImpl impl() const { return impl_; }
  const std::string& fallback_warning() const { return fallback_warning_; }
  int64_t chunk_rows() const { return chunk_rows_; }

 private:
  LinearCrossEntropyLoss() = default;
  absl::Status CheckRows(const at::Tensor& hidden, const OutputRows& rows) const;
  // Runs over all chunks; without `function` only the statistics are computed.
  absl::Status Run(const at::Tensor& hidden, const OutputRows& rows,
                   const TokenLossFunction* function, OutputGradients* gradients,
                   RowStatistics* statistics);
  void EnsureWorkspace();

  at::Tensor weight_, bias_;
  at::ScalarType logits_type_ = at::kFloat;
  LossImpl impl_ = LossImpl::kPytorch;
  std::string fallback_warning_;
  int64_t chunk_rows_ = 0;              // rows whose logits exist at the same time
  int64_t block_rows_ = 0;              // rows of a chunk that are worked on together
  at::Tensor logits_;                   // [chunk_rows, V]
  at::Tensor exponentials_, products_;  // [block_rows, V]
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_FUSED_OUTPUT_LOSS_H_
