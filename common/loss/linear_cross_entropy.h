// A linear output layer and a token-level loss, without the [N, V] logits.
//
// N rows, H hidden, V vocabulary; z = (h W^T + b) / temperature, p = softmax(z), y the label.
// A token-level loss needs of z only logp = z_y - L and entropy = L - sum_j p_j z_j with
// L = logsumexp(z), and answers with c = d loss / d logp and e = d loss / d entropy. Then
//   dz_j = (c (1[j = y] - p_j) - e p_j (z_j - sum_k p_k z_k)) / temperature.
// The logits are computed tile by tile (some rows, some columns), merged into row statistics,
// and overwritten by dz, which is multiplied into d hidden and d weight. The idea is from Liger
// (https://arxiv.org/abs/2410.10989) and cut cross-entropy (https://arxiv.org/abs/2411.09009).
//
// The layer may be vocabulary-parallel: of n ranks, rank r holds the rows [r V/n, (r+1) V/n) of its
// weight and bias, and only row statistics travel.
#ifndef TANDEM_COMMON_LOSS_LINEAR_CROSS_ENTROPY_H_
#define TANDEM_COMMON_LOSS_LINEAR_CROSS_ENTROPY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/loss/fused_output_loss.h"
#include "common/loss/logit_kernels.h"
#include "common/ops/tensor_parallel_group.h"

namespace tandem::loss {

enum class LossImpl {
  kAuto,          // the first of the following that the device and the type have
  kCce,           // own kernels on tiles of rows and columns
  kTorchCompile,  // own kernels on whole rows: one product a chunk, its epilogue fused
  kPytorch,       // ATen operations on whole rows
};

// "auto", "cce", "torch_compile" or "pytorch". INVALID_ARGUMENT for another name.
absl::StatusOr<LossImpl> ParseLossImpl(absl::string_view name);
const char* LossImplName(LossImpl impl);

struct LinearCrossEntropyOptions {
  LossImpl impl = LossImpl::kAuto;
  int64_t chunk_size = 4096;  // most rows a chunk
  // Bound of all memory that logits take. Decides the rows of a chunk together with chunk_size, and
  // the mode. At least three rows of logits.
  int64_t logits_chunk_bytes = 48 << 20;
  // The ranks that share out the vocabulary. Every rank makes the same calls with the same hidden
  // states, rows and options, and its function, which sees the same bits on all of them, must give
  // the same answers. Of the gradients those of weight and bias are then whole, [V/n, H] and
  // [V/n], and that of `hidden` is a part, whose sum over the ranks is the gradient.
  std::shared_ptr<ops::TensorParallelGroup> group = nullptr;
};

class LinearCrossEntropyLoss : public FusedOutputLoss {
 public:
  // `weight` [V, H] and `bias` [V] (or undefined) are those of the output layer, shared,
  // contiguous, on any device: float32, float64 or bfloat16 (`bias` float32 then). Hidden states
  // have the type of the weight, or bfloat16 where it is float32. Logits are accumulated and kept
  // in float32 (float64 if the weight is). On a GPU a chunk of rows costs one wait for the device.
  // With a group they are this rank's rows, V/n of them. INVALID_ARGUMENT for shapes and options,
  // UNIMPLEMENTED for other types.
  static absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> Create(
      at::Tensor weight, at::Tensor bias = {}, const LinearCrossEntropyOptions& options = {});

  absl::Status ForwardBackward(const at::Tensor& hidden, const OutputRows& rows,
                               TokenLossFunction function, OutputGradients& gradients,
                               LossMode mode = LossMode::kAuto) override;
  absl::StatusOr<RowLogProbs> LogProbs(const at::Tensor& hidden, const OutputRows& rows) override;
  // c10::NotImplementedError with a group.
  at::Tensor ForwardLogits(const at::Tensor& hidden) const override;

  // What runs, never kAuto.
  LossImpl impl() const { return impl_; }
  // Why it is that one, for the log; a warning if something else was asked for.
  const std::string& reason() const { return reason_; }
  bool is_fallback() const { return is_fallback_; }
  // Rows whose logits are kept at the same time, and columns of a tile.
  int64_t chunk_rows() const { return chunk_rows_; }
  int64_t tile_columns() const { return tile_columns_; }

 private:
  class Call;
  LinearCrossEntropyLoss() = default;
  void ChooseImpl(LossImpl asked_for);
  void PlanMemory(const LinearCrossEntropyOptions& options);
  absl::Status CheckRows(const at::Tensor& hidden, const OutputRows& rows) const;
  LossMode ModeFor(LossMode asked_for, int64_t rows) const;

  at::Tensor weight_, bias_;
  std::shared_ptr<ops::TensorParallelGroup> group_;  // nullptr: the vocabulary is whole
  int64_t first_label_ = 0;                          // that the first row of weight_ stands for
  int64_t vocabulary_ = 0;                           // of all ranks
  at::ScalarType logits_type_ = at::kFloat;
  LossImpl impl_ = LossImpl::kPytorch;
  std::string reason_;
  bool is_fallback_ = false;
  const LogitKernels* kernels_ = nullptr;
  bool shares_out_ = false;  // whole tiles among the threads of the CPU
  int64_t tile_columns_ = 0;
  int64_t chunk_rows_ = 0;  // rows whose logits exist at the same time in kGradientInForward
  int64_t tile_rows_ = 0;   // rows of a tile in kRecompute
  at::Tensor buffer_;       // of the logits, kept: fresh memory is slow
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LINEAR_CROSS_ENTROPY_H_
