#include "common/loss/linear_divergence.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/not_finite.h"
#include "common/base/status_macros.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/loss/logit_kernels.h"
#include "common/loss/output_rows.h"
#include "common/ops/matrix_product.h"
#include "common/ops/ops.h"
#include "common/ops/parallel_for.h"

namespace tandem::loss {
namespace {

// Rows that ATen works on together are read and written some ten times: they should stay in the
// cache of a CPU.
constexpr int64_t kBlockBytes = 4 << 20;
// It has three copies of them, beside the logits of both models.
constexpr int64_t kBlockCopies = 3, kModels = 2;
constexpr int64_t kWorkPerLogit = 40;  // about three exponentials, in multiply-adds

// Some rows of logits of both models, not yet divided by the temperature, and what becomes of them.
struct Logits {
  at::Tensor senior, junior;  // [n, V], contiguous
  at::Tensor scales;          // [n], 1 / temperature; undefined for 1
  KlDirection direction;
  double scale;          // of the gradient
  bool gradient;         // whether the senior's logits are overwritten by
  at::ScalarType dtype;  // GradientOf(senior, dtype)
};

// Returns the divergences [n], in the type of the logits, of which nothing but the gradient is
// left.
at::Tensor AtenDivergences(const Logits& logits, int64_t block_rows) {
  const int64_t rows = logits.senior.size(0);
  at::Tensor divergences = at::empty({rows}, logits.senior.options());
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t count = std::min(block_rows, rows - row);
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, row, count); };
    const auto column = [&](const at::Tensor& x) { return part(x).unsqueeze(1); };
    const auto log_softmax = [&](const at::Tensor& x) {
      at::Tensor z = part(x);
      if (logits.scales.defined()) z.mul_(column(logits.scales));
      return at::log_softmax(z, 1);
    };
    at::Tensor logp = log_softmax(logits.senior), logq = log_softmax(logits.junior);
    at::Tensor dz;
    if (logits.direction == KlDirection::kReverse) {
      dz = logp.exp();
      logp.sub_(logq);
      part(divergences).copy_(at::mul_out(logq, dz, logp).sum(1));
      if (logits.gradient) dz.mul_(logp.sub_(column(divergences)));
    } else {
      const at::Tensor q = logq.exp();
      part(divergences).copy_(logq.sub_(logp).mul_(q).sum(1));
      if (logits.gradient) dz = logp.exp_().sub_(q);
    }
    if (!logits.gradient) continue;
    dz.mul_(logits.scale);
    if (logits.scales.defined()) dz.mul_(column(logits.scales));
    part(GradientOf(logits.senior, logits.dtype)).copy_(dz);
  }
  return divergences;
}

// The same on own kernels: float32 on the CPU, without copies. Returns float64.
at::Tensor CpuDivergences(const Logits& logits) {
  const int64_t rows = logits.senior.size(0), width = logits.senior.size(1);
  at::Tensor divergences = at::empty({rows}, at::kDouble);
  auto* const senior = logits.senior.mutable_data_ptr<float>();
  const auto* const junior = logits.junior.const_data_ptr<float>();
  const float* const scales =
      logits.scales.defined() ? logits.scales.const_data_ptr<float>() : nullptr;
  auto* const out = divergences.mutable_data_ptr<double>();
  ops::ParallelFor(rows, width * kWorkPerLogit, [&](int64_t begin, int64_t end) {
    kernels::GetCpuKernels().logit_divergence(
        {.logits = senior + begin * width,
         .junior_logits = junior + begin * width,
         .scales = scales == nullptr ? nullptr : scales + begin,
         .rows = end - begin,
         .width = width,
         .forward = logits.direction == KlDirection::kForward,
         .gradient = logits.gradient,
         .gradient_scale = static_cast<float>(logits.scale),
         .bfloat16 = logits.dtype == at::kBFloat16,
         .divergences = out + begin});
  });
  return divergences;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LinearDivergenceLoss>> LinearDivergenceLoss::Create(
    at::Tensor weight, at::Tensor junior_weight, const LinearDivergenceOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("weight", weight));
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("junior_weight", junior_weight));
  if (junior_weight.size(0) != weight.size(0)) {
    return InvalidField("junior_weight", absl::StrCat("has a vocabulary of ", junior_weight.size(0),
                                                      ", the senior's is ", weight.size(0)));
  }
  if (junior_weight.scalar_type() != weight.scalar_type() ||
      junior_weight.device() != weight.device()) {
    return InvalidField("junior_weight", "must have the type and the device of the senior's");
  }
  std::unique_ptr<LinearDivergenceLoss> loss(new LinearDivergenceLoss);
  loss->weight_ = weight.detach();
  loss->junior_weight_ = junior_weight.detach();
  loss->logits_type_ = at::toOpMathType(weight.scalar_type());
  loss->own_kernels_ = loss->logits_type_ == at::kFloat && weight.is_cpu() &&
                       ops::GetKernelPath() == ops::KernelPath::kAuto;
  TANDEM_RETURN_IF_ERROR(loss->PlanMemory(options.logits_chunk_bytes));
  return loss;
}

absl::Status LinearDivergenceLoss::PlanMemory(int64_t logits_chunk_bytes) {
  const int64_t row_bytes = weight_.size(0) * static_cast<int64_t>(c10::elementSize(logits_type_));
  // A row of each kind.
  const int64_t least = (kModels + kBlockCopies) * row_bytes;
  if (logits_chunk_bytes < least) {
    return InvalidField("logits_chunk_bytes",
                        absl::StrCat("must be at least ", least,
                                     " for two models with a vocabulary of ", weight_.size(0)));
  }
  const int64_t block_bytes = std::min(kBlockBytes, logits_chunk_bytes / (kModels + kBlockCopies));
  block_rows_ = std::max<int64_t>(1, block_bytes / row_bytes);
  const int64_t copies = own_kernels_ ? 0 : kBlockCopies * block_rows_;
  chunk_rows_ = (logits_chunk_bytes / row_bytes - copies) / kModels;
  return absl::OkStatus();
}

absl::Status LinearDivergenceLoss::Check(const at::Tensor& hidden, const at::Tensor& junior_hidden,
                                         const DivergenceRows& rows, double scale,
                                         const OutputGradients& gradients) const {
  TANDEM_RETURN_IF_ERROR(CheckHidden("hidden", hidden, weight_));
  TANDEM_RETURN_IF_ERROR(CheckHidden("junior_hidden", junior_hidden, junior_weight_));
  if (junior_hidden.size(0) != hidden.size(0)) {
    return InvalidField("junior_hidden", "must have as many rows as the senior's");
  }
  TANDEM_RETURN_IF_ERROR(CheckTemperatures(rows.temperatures, rows.positions.size()));
  TANDEM_RETURN_IF_ERROR(
      CheckIndices("positions", rows.positions, hidden.size(0), "the hidden states"));
  if (!std::isfinite(scale)) return InvalidField("scale", "must be finite");
  if (gradients.bias.defined()) {
    return InvalidField("gradients.bias", "must be undefined: the layers have no bias");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> LinearDivergenceLoss::ForwardBackward(
    const at::Tensor& hidden, const at::Tensor& junior_hidden, const DivergenceRows& rows,
    KlDirection direction, double scale, OutputGradients& gradients) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(Check(hidden, junior_hidden, rows, scale, gradients));
  std::vector<double> divergences;
  if (rows.positions.empty()) return divergences;

  const auto count = static_cast<int64_t>(rows.positions.size()), vocabulary = weight_.size(0);
  const at::ScalarType dtype = weight_.scalar_type();
  const at::TensorOptions options = weight_.options().dtype(logits_type_);
  const at::Tensor positions = ToDevice(rows.positions, weight_.device());
  const at::Tensor input = SelectRows(hidden, rows.positions, positions).to(dtype);
  const at::Tensor junior_input = SelectRows(junior_hidden, rows.positions, positions).to(dtype);
  at::Tensor scales;
  if (!rows.temperatures.empty()) scales = ToDevice(rows.temperatures, options).reciprocal_();

  const int64_t part_rows = EqualParts(count, chunk_rows_);
  if (!buffer_.defined() || buffer_.size(1) < part_rows * vocabulary) {
    buffer_.reset();  // before there is a larger one
    buffer_ = at::empty({kModels, part_rows * vocabulary}, options);
  }
  for (int64_t begin = 0; begin < count; begin += part_rows) {
    const int64_t size = std::min(part_rows, count - begin);
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, size); };
    const auto logits_of = [&](int64_t model) {
      return buffer_[model].narrow(0, 0, size * vocabulary).view({size, vocabulary});
    };
    const Logits logits = {.senior = logits_of(0),
                           .junior = logits_of(1),
                           .scales = scales.defined() ? part(scales) : scales,
                           .direction = direction,
                           .scale = scale,
                           .gradient = gradients.hidden.defined() || gradients.weight.defined(),
                           .dtype = dtype};
    ops::MatrixProductInto(logits.senior, part(input), weight_.t());
    ops::MatrixProductInto(logits.junior, part(junior_input), junior_weight_.t());
    const at::Tensor found =
        (own_kernels_ ? CpuDivergences(logits) : AtenDivergences(logits, block_rows_))
            .to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
    const double* const numbers = found.const_data_ptr<double>();
    for (int64_t row = 0; row < size; ++row) {
      if (!std::isfinite(numbers[row])) {
        return NotFiniteError(
            absl::StrCat("the divergence of row ", begin + row, " is not finite"));
      }
    }
    divergences.insert(divergences.end(), numbers, numbers + size);

    const at::Tensor dz = GradientOf(logits.senior, dtype);
    if (gradients.weight.defined()) {
      ops::MatrixProductInto(gradients.weight, dz.t(), part(input), /*accumulate=*/true);
    }
    if (gradients.hidden.defined()) {
      const at::Tensor of_hidden = at::empty({size, weight_.size(1)}, options);
      ops::MatrixProductInto(of_hidden, dz, weight_);
      gradients.hidden.index_add_(0, part(positions), of_hidden.to(gradients.hidden.scalar_type()));
    }
  }
  return divergences;
}

}  // namespace tandem::loss
