// A linear output layer and a token-level loss, without the [N, V] logits.
//
// N rows, H hidden, V vocabulary; z = h W^T / temperature, p = softmax(z), y the label. With a soft
// cap, z = soft_cap tanh(h W^T / soft_cap) / temperature.
// A token-level loss needs only two numbers of a row, logp = z_y - L and entropy = L - sum_j p_j
// z_j with L = logsumexp(z), and answers with c = d loss / d logp and e = d loss / d entropy. Then
//   dz_j = (c (1[j = y] - p_j) - e p_j (z_j - sum_k p_k z_k)) / temperature,
// and through a soft cap 1 - (logit_j / soft_cap)^2 times that.
// The logits are computed tile by tile (some rows, some columns), merged into row statistics,
// and overwritten by dz, which is multiplied into d hidden and d weight. The idea is from Liger
// (https://arxiv.org/abs/2410.10989) and cut cross-entropy (https://arxiv.org/abs/2411.09009).
//
// The layer may be vocabulary-parallel: every rank holds some rows of its weight, and only row
// statistics travel.
#ifndef TANDEM_COMMON_LOSS_LOGITS_LINEAR_CROSS_ENTROPY_H_
#define TANDEM_COMMON_LOSS_LOGITS_LINEAR_CROSS_ENTROPY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/kernels/logit_blocks.h"
#include "common/loss/logits/fused_output_loss.h"
#include "common/loss/logits/logit_kernels.h"
#include "common/loss/logits/logits_buffer.h"
#include "common/loss/logits/vocabulary_shard.h"
#include "common/ops/products/matrix_rows.h"

namespace tandem::loss {

// Columns of a tile of logits on the CPU.
inline constexpr int64_t kTileColumns = kernels::kLogitBlock;

// Implementations of the work on logits.
enum class LossImpl {
  kAuto,   // the fastest that the device and the type have: kTiles on the CPU, kRows on a GPU
  kTiles,  // own kernels on tiles of rows and columns
  kRows,   // own kernels on whole rows: one product per chunk of rows
  kAten,   // ATen operations on whole rows
};

// The implementation that a value of `batch.loss_impl` stands for: "auto", "cce" (kTiles),
// "torch_compile" (kRows) or "pytorch" (kAten). INVALID_ARGUMENT for another value.
absl::StatusOr<LossImpl> ParseLossImpl(absl::string_view name);

// "auto", "tiles", "rows" or "aten", for logs.
const char* LossImplName(LossImpl impl);

struct LinearCrossEntropyOptions {
  LossImpl impl = LossImpl::kAuto;
  int64_t chunk_size = 4096;  // maximum of rows per chunk
  // Bound of all memory that logits take; at least three rows of logits. Decides the rows of a
  // chunk together with chunk_size, and the mode.
  int64_t logits_chunk_bytes = 48 << 20;
  // The rows of the output layer that this rank holds. Every rank makes the same calls with the
  // same hidden states, rows and options; its function, which sees the same bits on all of them,
  // must give the same answers. The gradient of the weight is then the whole one of the rank's
  // rows; the gradients of `hidden` must be summed over the ranks.
  VocabularyShard vocabulary = {};
  // The layer's logits x are soft_cap tanh(x / soft_cap); positive.
  std::optional<double> soft_cap = std::nullopt;
  // The memory of the logits; nullptr: the loss has its own.
  std::shared_ptr<LogitsBuffer> buffer = nullptr;
};

// Not thread-safe. Methods may throw c10::Error as libtorch does.
class LinearCrossEntropyLoss {
 public:
  // `weight` [V, H] is the weight of the output layer: shared, contiguous, on any device, float32,
  // float64 or bfloat16; of a shard it has this rank's rows. Hidden states have the type of the
  // weight, or bfloat16 where it is float32. Logits are accumulated and kept in float32 (float64 if
  // the weight is). On a GPU a chunk of rows costs one wait for the device. All ranks of a group
  // make this call, in which they agree on the mode. INVALID_ARGUMENT for shapes and options,
  // UNIMPLEMENTED for other types.
  static absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> Create(
      const ops::MatrixRows& weight, const LinearCrossEntropyOptions& options = {});

  // Computes the loss of `rows` of `hidden` [T, H] through `function`, and adds its gradients.
  // If `num_greatest` is not nullptr, it is set to the number of rows whose label has the greatest
  // logit. INVALID_ARGUMENT for shapes or labels that do not fit; after an error the gradients hold
  // an unusable partial sum.
  absl::Status ForwardBackward(const at::Tensor& hidden, const OutputRows& rows,
                               TokenLossFunction function, OutputGradients& gradients,
                               LossMode mode = LossMode::kAuto, int64_t* num_greatest = nullptr);

  // Returns the log-probabilities and entropies of `rows`, without any gradient.
  absl::StatusOr<RowLogProbs> LogProbs(const at::Tensor& hidden, const OutputRows& rows);

  // The implementation that runs, never kAuto.
  LossImpl impl() const { return impl_; }
  // Why that implementation runs, for the log.
  const std::string& reason() const { return reason_; }
  // Whether it is another one than was asked for.
  bool is_fallback() const { return is_fallback_; }
  // Rows whose logits are kept at the same time in kGradientInForward.
  int64_t chunk_rows() const { return chunk_rows_; }

 private:
  class Call;
  LinearCrossEntropyLoss() = default;
  void ChooseImpl(LossImpl asked_for);
  void PlanMemory(const LinearCrossEntropyOptions& options);
  absl::Status CheckRows(const at::Tensor& hidden, const OutputRows& rows) const;
  LossMode ModeFor(LossMode asked_for, int64_t rows) const;

  ops::MatrixRows weight_;
  VocabularyShard vocabulary_;
  std::optional<double> soft_cap_;
  at::ScalarType logits_type_ = at::kFloat;
  LossImpl impl_ = LossImpl::kAten;
  std::string reason_;
  bool is_fallback_ = false;
  const LogitKernels* kernels_ = nullptr;
  bool parallel_tiles_ = false;     // whether each thread of the CPU works on whole tiles
  bool prefers_recompute_ = false;  // in LossMode::kAuto
  int64_t tile_columns_ = 0;
  int64_t chunk_rows_ = 0;
  int64_t tile_rows_ = 0;  // rows of a tile in kRecompute
  std::shared_ptr<LogitsBuffer> buffer_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_LINEAR_CROSS_ENTROPY_H_
