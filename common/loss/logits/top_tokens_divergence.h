// The divergence of an output layer from a teacher of which only the likeliest tokens are known,
// without the [N, V] logits.
//
// N rows, V vocabulary, k tokens of the teacher in each row, T the temperature of a row. The k
// tokens and all others together, the rest, are k + 1 buckets. p_b are the probabilities of the
// buckets under the student, softmax(h W^T / T), and q_b those under the teacher, of which the rest
// gets what its k tokens leave, at least kMinRest, before they are scaled to sum 1. The divergence
// (divergence.h) is that of these two distributions: at most the one over the whole vocabulary.
// With z the student's logits divided by T, the gradient of a bucket is
//   reverse         D_b = p_b (log p_b - log q_b - KL(p || q))
//   forward         D_b = p_b - q_b
//   Jensen-Shannon  D_b = (1 - beta) p_b (log p_b - log m_b - KL(p || m))
// and dz_j = D_b for the token j of bucket b, dz_j = D_rest p_j / p_rest for a token of the rest.
//
// The logits of some rows at a time are overwritten by their gradient. Their k tokens are taken out
// first, so that p_rest is a sum and not a difference. The output layer may be vocabulary-parallel:
// of a row, the ranks exchange the maximum and the sum of the rest, and k logits.
#ifndef TANDEM_COMMON_LOSS_LOGITS_TOP_TOKENS_DIVERGENCE_H_
#define TANDEM_COMMON_LOSS_LOGITS_TOP_TOKENS_DIVERGENCE_H_

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
#include "common/loss/logits/logit_kernels.h"
#include "common/loss/logits/logits_buffer.h"
#include "common/loss/logits/vocabulary_shard.h"
#include "common/ops/products/matrix_rows.h"

namespace tandem::loss {

// The least probability of the teacher's rest: the rounding of float32 log-probabilities, which may
// sum to more than 1.
inline constexpr double kMinRest = 1.0 / (1 << 20);

// Rows of the student's hidden states, and what the teacher says of them.
struct TopTokenRows {
  std::vector<int64_t> positions;  // [N], rows of `hidden`; no position twice
  int64_t count = 0;               // k, in [1, V)
  // [N, k]: token ids in [0, V), no token twice in a row, and their log-probabilities.
  absl::Span<const int32_t> ids;
  absl::Span<const float> logprobs;
  std::vector<double> temperatures = {};  // [N], or empty for 1 everywhere
};

struct TopTokensDivergenceOptions {
  // Bound of the memory that logits take; at least three rows.
  int64_t logits_chunk_bytes = 48 << 20;
  // As in LinearDivergenceOptions.
  VocabularyShard vocabulary = {};
  std::optional<double> soft_cap = std::nullopt;
  // As in LinearCrossEntropyOptions.
  std::shared_ptr<LogitsBuffer> buffer = nullptr;
};

// Not thread-safe. Methods may throw c10::Error as libtorch does.
class TopTokensDivergenceLoss {
 public:
  // `weight` [V, H] is as in LinearDivergenceLoss::Create, and so are the errors.
  static absl::StatusOr<std::unique_ptr<TopTokensDivergenceLoss>> Create(
      const ops::MatrixRows& weight, const TopTokensDivergenceOptions& options = {});

  // One number per row.
  struct Result {
    std::vector<double> divergences;  // nats
    std::vector<double> rest;         // p_rest, the student's mass outside of the k tokens
  };

  // As LinearDivergenceLoss::ForwardBackward.
  absl::StatusOr<Result> ForwardBackward(const at::Tensor& hidden, const TopTokenRows& rows,
                                         const Divergence& divergence,
                                         absl::Span<const double> scales,
                                         OutputGradients& gradients);

  // Rows whose logits are kept at the same time.
  int64_t chunk_rows() const { return chunk_rows_; }

 private:
  TopTokensDivergenceLoss() = default;
  absl::Status Check(const at::Tensor& hidden, const TopTokenRows& rows,
                     absl::Span<const double> scales) const;

  ops::MatrixRows weight_;
  VocabularyShard vocabulary_;
  std::optional<double> soft_cap_;
  at::ScalarType logits_type_ = at::kFloat;
  const LogitKernels* kernels_ = nullptr;
  int64_t chunk_rows_ = 0;
  std::shared_ptr<LogitsBuffer> buffer_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_TOP_TOKENS_DIVERGENCE_H_
