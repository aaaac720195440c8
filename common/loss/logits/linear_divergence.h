// The divergence between the output layers of two models, without the [N, V] logits of either.
//
// N rows, V vocabulary, T the temperature of a row. p = softmax(h W^T / T) is the student, which
// learns; q = softmax(h' W'^T / T) is the frozen teacher, whose hidden width H' may differ. Over
// the whole vocabulary, with z the student's logits divided by T:
//   reverse  KL(p || q) = sum_j p_j (log p_j - log q_j)   dz_j = p_j (log p_j - log q_j - KL)
//   forward  KL(q || p) = sum_j q_j (log q_j - log p_j)   dz_j = p_j - q_j
//   Jensen-Shannon, with m = beta q + (1 - beta) p and B = KL(p || m)
//     beta KL(q || m) + (1 - beta) B      dz_j = (1 - beta) p_j (log p_j - log m_j - B)
// Each model's own logits may have a soft cap x -> cap tanh(x / cap), which the student's gradient
// goes back through.
// The logits of both are computed for some rows at a time, and the student's are overwritten by
// their gradient dz / T, which is multiplied into d hidden and d weight.
//
// The two output layers may be vocabulary-parallel: every rank holds the rows of the same token ids
// of both, and only statistics of rows travel. With the maxima m and m' of a row's scaled logits z
// and z', d = z - m and d' = z' - m', these are S = sum_j e^d_j, S' = sum_j e^d'_j and the moment
// M = sum_j e^d_j (d_j - d'_j) for reverse, M = sum_j e^d'_j (d'_j - d_j) for forward, and
//   KL(p || q) = M / S + log(S' / S), KL(q || p) = M / S' + log(S / S').
// The Jensen-Shannon divergence needs log p and log q first: its two KLs are two sums more.
#ifndef TANDEM_COMMON_LOSS_LOGITS_LINEAR_DIVERGENCE_H_
#define TANDEM_COMMON_LOSS_LOGITS_LINEAR_DIVERGENCE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/divergence.h"
#include "common/loss/logits/fused_output_loss.h"
#include "common/loss/logits/vocabulary_shard.h"
#include "common/ops/products/matrix_rows.h"

namespace tandem::loss {

// Rows of the hidden states of both models.
struct DivergenceRows {
  std::vector<int64_t> positions;         // [N]; no position twice
  std::vector<double> temperatures = {};  // [N], or empty for 1 everywhere
};

struct LinearDivergenceOptions {
  // Bound of all memory that the logits of both models take; at least six rows of logits.
  int64_t logits_chunk_bytes = 48 << 20;
  // The rows of both output layers that this rank holds. Every rank makes the same calls with the
  // same hidden states, rows and options, and gets the same divergences. The gradient of the weight
  // is the whole one of the rank's rows; the gradients of `hidden` must be summed over the ranks.
  VocabularyShard vocabulary = {};
  // As in LinearCrossEntropyOptions, of either model.
  std::optional<double> soft_cap = std::nullopt, teacher_soft_cap = std::nullopt;
};

// Not thread-safe. Methods may throw c10::Error as libtorch does.
class LinearDivergenceLoss {
 public:
  // `weight` [V, H] and `teacher_weight` [V, H'] are the weights of the output layers (of a shard,
  // this rank's rows): shared, contiguous, on one device, both float32, float64 or bfloat16. Logits
  // are accumulated and kept in float32 (float64 if the weights are). On a GPU a chunk of rows
  // costs one wait for the device. INVALID_ARGUMENT for shapes, devices and options, UNIMPLEMENTED
  // for other types.
  static absl::StatusOr<std::unique_ptr<LinearDivergenceLoss>> Create(
      const ops::MatrixRows& weight, const ops::MatrixRows& teacher_weight,
      const LinearDivergenceOptions& options = {});

  // Returns the divergence (nats) of every row of `hidden` [T, H] and `teacher_hidden` [T, H'],
  // whose types are that of the weights, or bfloat16 where it is float32; adds the gradient of
  // their sum, weighted by `scales` [N], to gradients.hidden and gradients.weight. Rounding may
  // leave a value just below 0. INVALID_ARGUMENT for what does not fit, NotFiniteError for a
  // divergence; after an error the gradients hold an unusable partial sum.
  absl::StatusOr<std::vector<double>> ForwardBackward(
      const at::Tensor& hidden, const at::Tensor& teacher_hidden, const DivergenceRows& rows,
      const Divergence& divergence, absl::Span<const double> scales, OutputGradients& gradients);

  // Rows whose logits are kept at the same time; fewer for Jensen-Shannon.
  int64_t chunk_rows() const { return chunk_rows_; }

 private:
  LinearDivergenceLoss() = default;
  absl::Status PlanMemory(int64_t logits_chunk_bytes);
  absl::Status Check(const at::Tensor& hidden, const at::Tensor& teacher_hidden,
                     const DivergenceRows& rows, absl::Span<const double> scales) const;

  ops::MatrixRows weight_, teacher_weight_;
  VocabularyShard vocabulary_;
  std::optional<double> soft_cap_, teacher_soft_cap_;
  at::ScalarType logits_type_ = at::kFloat;
  bool own_kernels_ = false;  // instead of ATen
  int64_t chunk_rows_ = 0, mixture_chunk_rows_ = 0;
  int64_t block_rows_ = 0;  // rows of a chunk that ATen works on together
  at::Tensor buffer_;       // of logits; kept, because fresh memory is slow
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_LINEAR_DIVERGENCE_H_
