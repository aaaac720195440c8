#include "common/loss/logits/top_tokens_divergence.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/logits/output_rows.h"
#include "common/loss/logits/row_statistics.h"
#include "common/ops/ops.h"
#include "common/ops/products/matrix_product.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::loss {
namespace {

// A logit that stands for minus infinity: with any temperature its exponential is 0, and its square
// is finite.
constexpr double kTakenOut = -1e15;
constexpr int64_t kMinChunkRows = 3;

// The columns of this rank that hold the teacher's k tokens of some rows.
struct TopColumns {
  TopColumns(const at::Tensor& ids, int64_t first, int64_t width) {
    const at::Tensor local = ids - first;
    inside = local.ge(0).logical_and_(local.lt(width));
    columns = local.clamp(0, width - 1);
  }
  at::Tensor columns;  // [n, k]; 0 or width - 1 where the token is another rank's
  at::Tensor inside;   // [n, k]
};

// Log-probabilities of the k + 1 buckets, the rest last: float64 [n, k + 1].
struct Buckets {
  at::Tensor student, teacher;
};

struct BucketGradients {
  at::Tensor divergences;  // [n]
  at::Tensor gradients;    // [n, k + 1]: D_b of top_tokens_divergence.h
};

// Returns the teacher's buckets of [n, k] log-probabilities.
at::Tensor TeacherBuckets(const at::Tensor& logprobs) {
  const at::Tensor rest = (1 - logprobs.exp().sum(1, /*keepdim=*/true)).clamp_min(kMinRest).log();
  return at::cat({logprobs, rest}, 1).log_softmax(1);
}

at::Tensor Kl(const at::Tensor& from, const at::Tensor& to) {
  return (from.exp() * (from - to)).sum(1);
}

BucketGradients GradientsOf(const Buckets& buckets, const Divergence& divergence) {
  const at::Tensor &logp = buckets.student, &logq = buckets.teacher;
  const at::Tensor p = logp.exp();
  switch (divergence.kind) {
    case DivergenceKind::kReverse: {
      const at::Tensor kl = Kl(logp, logq);
      return {.divergences = kl, .gradients = p * (logp - logq - kl.unsqueeze(1))};
    }
    case DivergenceKind::kForward:
      return {.divergences = Kl(logq, logp), .gradients = p - logq.exp()};
    case DivergenceKind::kJensenShannon:
      break;
  }
  const double beta = divergence.beta;
  const at::Tensor mixture = at::logaddexp(logq + std::log(beta), logp + std::log1p(-beta));
  const at::Tensor kl = Kl(logp, mixture);
  return {.divergences = Kl(logq, mixture) * beta + kl * (1 - beta),
          .gradients = p * (logp - mixture - kl.unsqueeze(1)) * (1 - beta)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<TopTokensDivergenceLoss>> TopTokensDivergenceLoss::Create(
    const ops::MatrixRows& weight, const TopTokensDivergenceOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("weight", weight));
  TANDEM_RETURN_IF_ERROR(CheckVocabularyShard(options.vocabulary, weight));
  TANDEM_RETURN_IF_ERROR(CheckSoftCap("soft_cap", options.soft_cap));
  std::unique_ptr<TopTokensDivergenceLoss> loss(new TopTokensDivergenceLoss);
  loss->weight_ = weight;
  loss->vocabulary_ = options.vocabulary.WithRows(weight.size(0));
  loss->soft_cap_ = options.soft_cap;
  loss->buffer_ = options.buffer != nullptr ? options.buffer : std::make_shared<LogitsBuffer>();
  loss->logits_type_ = at::toOpMathType(weight.scalar_type());
  const LogitKernels* const own = OwnLogitKernels(weight.device(), loss->logits_type_);
  loss->kernels_ = own == nullptr ? &kAtenLogitKernels : own;
  // Ranks exchange statistics chunk by chunk, so that all of them need the same chunks.
  const int64_t row_bytes =
      loss->vocabulary_.most_rows * static_cast<int64_t>(c10::elementSize(loss->logits_type_));
  if (options.logits_chunk_bytes < kMinChunkRows * row_bytes) {
    return InvalidField("logits_chunk_bytes",
                        absl::StrCat("must be at least ", kMinChunkRows * row_bytes,
                                     " for a vocabulary of ", loss->vocabulary_.most_rows));
  }
  const int64_t scratch = loss->kernels_->scratch_bytes(options.logits_chunk_bytes / kMinChunkRows);
  loss->chunk_rows_ = (options.logits_chunk_bytes - scratch) / row_bytes;
  return loss;
}

absl::Status TopTokensDivergenceLoss::Check(const at::Tensor& hidden, const TopTokenRows& rows,
                                            absl::Span<const double> scales) const {
  TANDEM_RETURN_IF_ERROR(CheckHidden("hidden", hidden, weight_));
  TANDEM_RETURN_IF_ERROR(
      CheckIndices("positions", rows.positions, hidden.size(0), "the hidden states"));
  const size_t count = rows.positions.size();
  TANDEM_RETURN_IF_ERROR(CheckTemperatures(rows.temperatures, count));
  TANDEM_RETURN_IF_ERROR(CheckScales(scales, count));
  if (rows.count < 1 || rows.count >= vocabulary_.size) {
    return InvalidField(
        "count", absl::StrCat("must be at least 1 and below the vocabulary of ", vocabulary_.size));
  }
  const size_t numbers = count * static_cast<size_t>(rows.count);
  if (rows.ids.size() != numbers) return InvalidField("ids", "must have `count` ids per position");
  if (rows.logprobs.size() != numbers) {
    return InvalidField("logprobs", "must have `count` numbers per position");
  }
  for (size_t i = 0; i < numbers; ++i) {
    if (rows.ids[i] >= 0 && rows.ids[i] < vocabulary_.size) continue;
    return InvalidField(absl::StrCat("ids[", i, "]"),
                        absl::StrCat(rows.ids[i], " is outside the vocabulary"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TopTokensDivergenceLoss::Result> TopTokensDivergenceLoss::ForwardBackward(
    const at::Tensor& hidden, const TopTokenRows& rows, const Divergence& divergence,
    absl::Span<const double> scales, OutputGradients& gradients) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(Check(hidden, rows, scales));
  Result result;
  if (rows.positions.empty()) return result;

  const auto count = static_cast<int64_t>(rows.positions.size()), width = weight_.size(0);
  const at::ScalarType dtype = weight_.scalar_type();
  const at::Device device = weight_.device();
  const at::TensorOptions options = weight_.options().dtype(logits_type_);
  const at::Tensor positions = CopyToDevice(rows.positions, device);
  const at::Tensor input = SelectRows(hidden, rows.positions, positions).to(dtype);
  const at::Tensor weights =
      CopyToDevice(std::vector<double>(scales.begin(), scales.end()), device);
  at::Tensor inverse_temperatures;  // [N], float64
  if (!rows.temperatures.empty()) {
    inverse_temperatures = CopyToDevice(rows.temperatures, device).reciprocal();
  }
  const auto on_device = [&](const auto& numbers, at::ScalarType from, at::ScalarType to) {
    // The copy reads the caller's numbers; nothing writes to them.
    const at::Tensor all = at::from_blob(
        const_cast<void*>(static_cast<const void*>(numbers.data())), {count, rows.count}, from);
    return CopyToDevice(all.to(to), device);
  };
  const at::Tensor ids = on_device(rows.ids, at::kInt, at::kLong);
  const at::Tensor teacher_logprobs = on_device(rows.logprobs, at::kFloat, at::kDouble);

  const int64_t chunk_rows = EqualChunkRows(count, chunk_rows_);
  const at::Tensor& buffer = buffer_->AtLeast(chunk_rows * width, options);
  for (int64_t begin = 0; begin < count; begin += chunk_rows) {
    const int64_t size = std::min(chunk_rows, count - begin);
    const auto rows_of = [&](const at::Tensor& x) { return x.narrow(0, begin, size); };
    LogitTile tile = {.logits = buffer.narrow(0, 0, size * width).view({size, width}),
                      .first_label = 0,
                      .labels = at::full({size}, -1, ids.options()),  // none
                      .scales = {},
                      .soft_cap = soft_cap_};
    weight_.MultiplyInto(tile.logits, rows_of(input));
    if (soft_cap_.has_value()) ops::SoftCap(tile.logits, *soft_cap_);
    const TopColumns top(rows_of(ids), vocabulary_.first, width);
    const at::Tensor own_logits = tile.logits.gather(1, top.columns);
    at::Tensor top_logits = own_logits.to(at::kDouble).masked_fill(top.inside.logical_not(), 0);
    if (inverse_temperatures.defined()) {
      tile.scales = rows_of(inverse_temperatures).to(logits_type_);
      top_logits.mul_(rows_of(inverse_temperatures).unsqueeze(1));
    }
    tile.logits.scatter_add_(1, top.columns, (kTakenOut - own_logits).mul_(top.inside));

    const RowStatistics tiles = EmptyRowStatistics(1, size, options);
    kernels_->statistics(tile, RowsOf(tiles, 0, 0, size));
    RowStatistics rest = MergeTiles(tiles);
    if (!vocabulary_.is_whole()) {
      rest = MergeRanks(rest, *vocabulary_.group);
      top_logits = vocabulary_.group->Sum(top_logits);
    }
    const at::Tensor log_rest = rest.max + rest.sum.log();
    const Buckets buckets = {
        .student = at::cat({top_logits, log_rest.unsqueeze(1)}, 1).log_softmax(1),
        .teacher = TeacherBuckets(rows_of(teacher_logprobs))};
    const BucketGradients found = GradientsOf(buckets, divergence);
    const at::Tensor student_rest = buckets.student.select(1, rows.count).exp();
    TANDEM_RETURN_IF_ERROR(AppendDivergences(at::stack({found.divergences, student_rest}), begin,
                                             {&result.divergences, &result.rest}));

    if (!gradients.hidden.defined() && !gradients.weight.defined()) continue;
    at::Tensor dz_buckets = found.gradients * rows_of(weights).unsqueeze(1);
    if (inverse_temperatures.defined()) {
      dz_buckets.mul_(rows_of(inverse_temperatures).unsqueeze(1));
    }
    const auto narrowed = [&](const at::Tensor& x) { return x.to(logits_type_); };
    const at::Tensor none = at::zeros({size}, options);
    kernels_->gradient(tile,
                       {.max = narrowed(rest.max),
                        .constants = narrowed(dz_buckets.select(1, rows.count) / rest.sum),
                        .slopes = none,
                        .at_label = none},
                       dtype);
    at::Tensor of_top = dz_buckets.narrow(1, 0, rows.count) * top.inside;
    if (soft_cap_.has_value()) {
      of_top.mul_((own_logits.to(at::kDouble) / *soft_cap_).square_().neg_().add_(1));
    }
    const at::Tensor dz = GradientOf(tile.logits, dtype);
    dz.scatter_add_(1, top.columns, of_top.to(dtype));
    AddOutputGradients(dz, rows_of(input), weight_, rows_of(positions), gradients);
  }
  return result;
}

}  // namespace tandem::loss
