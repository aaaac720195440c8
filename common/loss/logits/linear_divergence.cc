#include "common/loss/logits/linear_divergence.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/loss/logits/logit_kernels.h"
#include "common/loss/logits/output_rows.h"
#include "common/ops/ops.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/threads/parallel_for.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::loss {
namespace {

// The rows that ATen works on together (a block) are read and written some ten times, and should
// stay in the cache of a CPU.
constexpr int64_t kBlockBytes = 4 << 20;
// ATen holds up to four copies of a block, beside the logits of both models.
constexpr int64_t kBlockCopies = 4, kModels = 2;
constexpr int64_t kWorkPerLogit = 40;  // about three exponentials, in multiply-adds

// Some rows of logits of both models, after their soft caps and not yet divided by the temperature.
struct Logits {
  at::Tensor student, teacher;  // [n, V], contiguous
  at::Tensor scales;            // [n], 1 / temperature; undefined for 1
  Divergence divergence;
  std::optional<double> soft_cap;  // of the student

  bool is_forward() const { return divergence.kind == DivergenceKind::kForward; }
};

// The statistics of linear_divergence.h: [n], float64, on the device of the logits.
struct Statistics {
  at::Tensor max, teacher_max, sum, teacher_sum, moment;
};

// The numbers from which the gradient of a row's logits follows:
//   factor e^d_j (d_j - d'_j - offset), or factor (e^d_j - e^d'_j offset) for forward.
struct DivergenceGradients {
  at::Tensor max, teacher_max, factors, offsets;  // [n], in the type of the logits
};

Statistics EmptyStatistics(int64_t rows, const at::TensorOptions& like) {
  const at::Tensor all = at::empty({5, rows}, like.dtype(at::kDouble));
  return {
      .max = all[0], .teacher_max = all[1], .sum = all[2], .teacher_sum = all[3], .moment = all[4]};
}

// Returns a copy of the logits of rows [begin, begin + count), each times its row's scale.
at::Tensor Scaled(const at::Tensor& logits, const at::Tensor& scales, int64_t begin,
                  int64_t count) {
  const at::Tensor rows = logits.narrow(0, begin, count);
  return scales.defined() ? rows * scales.narrow(0, begin, count).unsqueeze(1) : rows.clone();
}

Statistics AtenStatistics(const Logits& logits, int64_t block_rows) {
  const int64_t rows = logits.student.size(0);
  Statistics statistics = EmptyStatistics(rows, logits.student.options());
  const bool forward = logits.is_forward();
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t count = std::min(block_rows, rows - row);
    const auto block_of = [&](const at::Tensor& x) { return x.narrow(0, row, count); };
    at::Tensor d = Scaled(logits.student, logits.scales, row, count);
    at::Tensor teacher_d = Scaled(logits.teacher, logits.scales, row, count);
    const at::Tensor max = d.amax(1, /*keepdim=*/true), teacher_max = teacher_d.amax(1, true);
    block_of(statistics.max).copy_(max.squeeze(1));
    block_of(statistics.teacher_max).copy_(teacher_max.squeeze(1));
    d.sub_(max);
    teacher_d.sub_(teacher_max);
    // The divergence is an expectation: under the student for reverse, the teacher for forward.
    const at::Tensor& own = forward ? teacher_d : d;
    const at::Tensor& other = forward ? d : teacher_d;
    at::Tensor e = own.exp();
    block_of(forward ? statistics.teacher_sum : statistics.sum).copy_(e.sum(1));
    block_of(statistics.moment).copy_(e.mul_(own.sub_(other)).sum(1));
    block_of(forward ? statistics.sum : statistics.teacher_sum)
        .copy_(at::Tensor(other).exp_().sum(1));
  }
  return statistics;
}

// Multiplies the gradient of a block of the student's logits, which begins at `row`, by the
// derivative of their soft cap. `scratch` has the shape of `dz`.
void GoBackThroughSoftCap(const Logits& logits, int64_t row, at::Tensor& dz, at::Tensor& scratch) {
  if (!logits.soft_cap.has_value()) return;
  const at::Tensor t =
      scratch.copy_(logits.student.narrow(0, row, dz.size(0))).div_(*logits.soft_cap);
  dz.mul_(t.square_().neg_().add_(1));
}

// Overwrites the student's logits with their gradient, in the place of GradientOf(student, dtype).
void AtenGradient(const Logits& logits, const DivergenceGradients& gradients, at::ScalarType dtype,
                  int64_t block_rows) {
  const int64_t rows = logits.student.size(0);
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t count = std::min(block_rows, rows - row);
    const auto block_of = [&](const at::Tensor& x) { return x.narrow(0, row, count); };
    const auto column = [&](const at::Tensor& x) { return block_of(x).unsqueeze(1); };
    at::Tensor d = Scaled(logits.student, logits.scales, row, count).sub_(column(gradients.max));
    at::Tensor teacher_d =
        Scaled(logits.teacher, logits.scales, row, count).sub_(column(gradients.teacher_max));
    at::Tensor dz;
    if (!logits.is_forward()) {
      dz = d.exp();
      dz.mul_(d.sub_(teacher_d).sub_(column(gradients.offsets)));
    } else {
      dz = d.exp_().sub_(teacher_d.exp_().mul_(column(gradients.offsets)));
    }
    GoBackThroughSoftCap(logits, row, dz, teacher_d);
    block_of(GradientOf(logits.student, dtype)).copy_(dz.mul_(column(gradients.factors)));
  }
}

const float* ScalesOf(const Logits& logits) {
  return logits.scales.defined() ? logits.scales.const_data_ptr<float>() : nullptr;
}

// The same with own kernels: float32 on the CPU, without copies.
Statistics CpuStatistics(const Logits& logits) {
  const int64_t rows = logits.student.size(0), width = logits.student.size(1);
  Statistics statistics = EmptyStatistics(rows, logits.student.options());
  const auto* const student = logits.student.const_data_ptr<float>();
  const auto* const teacher = logits.teacher.const_data_ptr<float>();
  const float* const scales = ScalesOf(logits);
  ops::ParallelFor(rows, width * kWorkPerLogit, [&](int64_t begin, int64_t end) {
    const auto from_begin = [&](const at::Tensor& x) {
      return x.mutable_data_ptr<double>() + begin;
    };
    kernels::GetCpuKernels().divergence_statistics(
        {.logits = student + begin * width,
         .teacher_logits = teacher + begin * width,
         .scales = scales == nullptr ? nullptr : scales + begin,
         .rows = end - begin,
         .width = width,
         .forward = logits.is_forward(),
         .max = from_begin(statistics.max),
         .teacher_max = from_begin(statistics.teacher_max),
         .sum = from_begin(statistics.sum),
         .teacher_sum = from_begin(statistics.teacher_sum),
         .moment = from_begin(statistics.moment)});
  });
  return statistics;
}

void CpuGradient(const Logits& logits, const DivergenceGradients& gradients, at::ScalarType dtype) {
  const int64_t rows = logits.student.size(0), width = logits.student.size(1);
  auto* const student = logits.student.mutable_data_ptr<float>();
  const auto* const teacher = logits.teacher.const_data_ptr<float>();
  const float* const scales = ScalesOf(logits);
  ops::ParallelFor(rows, width * kWorkPerLogit, [&](int64_t begin, int64_t end) {
    const auto from_begin = [&](const at::Tensor& x) { return x.const_data_ptr<float>() + begin; };
    kernels::GetCpuKernels().divergence_gradient(
        {.logits = student + begin * width,
         .teacher_logits = teacher + begin * width,
         .scales = scales == nullptr ? nullptr : scales + begin,
         .rows = end - begin,
         .width = width,
         .forward = logits.is_forward(),
         .max = from_begin(gradients.max),
         .teacher_max = from_begin(gradients.teacher_max),
         .factors = from_begin(gradients.factors),
         .offsets = from_begin(gradients.offsets),
         .bfloat16 = dtype == at::kBFloat16,
         .soft_cap = static_cast<float>(logits.soft_cap.value_or(0))});
  });
}

// Turns the statistics of this rank's rows of the vocabulary into those of all ranks, the same bits
// on every rank.
Statistics MergeRanks(const Statistics& own, bool forward, ops::TensorParallelGroup& group) {
  const at::Tensor maxima = group.Max(at::stack({own.max, own.teacher_max}));
  const at::Tensor below = own.max - maxima[0], teacher_below = own.teacher_max - maxima[1];
  const at::Tensor factor = below.exp(), teacher_factor = teacher_below.exp();
  const at::Tensor moment =
      forward ? teacher_factor * (own.moment + (teacher_below - below) * own.teacher_sum)
              : factor * (own.moment + (below - teacher_below) * own.sum);
  const at::Tensor sums =
      group.Sum(at::stack({factor * own.sum, teacher_factor * own.teacher_sum, moment}));
  return {.max = maxima[0],
          .teacher_max = maxima[1],
          .sum = sums[0],
          .teacher_sum = sums[1],
          .moment = sums[2]};
}

at::Tensor MeanOf(const Statistics& rows, bool forward) {
  return rows.moment / (forward ? rows.teacher_sum : rows.sum);
}

at::Tensor Divergences(const Statistics& rows, bool forward) {
  const at::Tensor ratio = forward ? rows.sum / rows.teacher_sum : rows.teacher_sum / rows.sum;
  return MeanOf(rows, forward) + ratio.log();
}

// `weights` [n], float64: the factors of the rows' divergences in the loss.
DivergenceGradients GradientsOf(const Statistics& rows, const Logits& logits,
                                const at::Tensor& weights) {
  const at::ScalarType type = logits.student.scalar_type();
  const bool forward = logits.is_forward();
  at::Tensor factors = weights / rows.sum;
  if (logits.scales.defined()) factors = factors * logits.scales;
  const at::Tensor offsets = forward ? rows.sum / rows.teacher_sum : MeanOf(rows, forward);
  return {.max = rows.max.to(type),
          .teacher_max = rows.teacher_max.to(type),
          .factors = factors.to(type),
          .offsets = offsets.to(type)};
}

// The Jensen-Shannon divergence of rows whose log-sum-exps, over all ranks, are known: float64 [n].
class MixtureDivergence {
 public:
  MixtureDivergence(const Logits& logits, const Statistics& rows, int64_t block_rows)
      : logits_(logits),
        block_rows_(block_rows),
        log_sum_((rows.max + rows.sum.log()).to(logits.student.scalar_type())),
        teacher_log_sum_(
            (rows.teacher_max + rows.teacher_sum.log()).to(logits.student.scalar_type())) {}

  // Returns KL(p || m) and KL(q || m) of this rank's columns, [2, n].
  at::Tensor Moments() const {
    at::Tensor moments =
        at::empty({2, logits_.student.size(0)}, logits_.student.options().dtype(at::kDouble));
    ForBlocks([&](int64_t row, Block& block) {
      const auto add = [&](int64_t place, at::Tensor& logp) {
        at::Tensor p = logp.exp();
        moments[place].narrow(0, row, p.size(0)).copy_(p.mul_(logp.sub_(block.mixture)).sum(1));
      };
      add(0, block.student);
      add(1, block.teacher);
    });
    return moments;
  }

  // Overwrites the student's logits with their gradient. `student_kl` [n] is KL(p || m) over all
  // ranks, `weights` [n] the factors of the divergences in the loss; both float64.
  void Gradient(const at::Tensor& student_kl, const at::Tensor& weights,
                at::ScalarType dtype) const {
    const at::ScalarType type = logits_.student.scalar_type();
    at::Tensor factors = weights * (1 - logits_.divergence.beta);
    if (logits_.scales.defined()) factors = factors * logits_.scales;
    const at::Tensor columns = at::stack({student_kl.to(type), factors.to(type)}).unsqueeze(2);
    ForBlocks([&](int64_t row, Block& block) {
      const auto column = [&](int64_t i) {
        return columns[i].narrow(0, row, block.student.size(0));
      };
      at::Tensor dz = block.student.exp();
      dz.mul_(block.student.sub_(block.mixture).sub_(column(0)));
      GoBackThroughSoftCap(logits_, row, dz, block.teacher);
      GradientOf(logits_.student, dtype).narrow(0, row, dz.size(0)).copy_(dz.mul_(column(1)));
    });
  }

 private:
  // Log-probabilities of some rows.
  struct Block {
    at::Tensor student, teacher, mixture;
  };

  template <typename Work>
  void ForBlocks(const Work& work) const {
    const double beta = logits_.divergence.beta;
    for (int64_t row = 0; row < logits_.student.size(0); row += block_rows_) {
      const int64_t count = std::min(block_rows_, logits_.student.size(0) - row);
      const auto logps = [&](const at::Tensor& logits, const at::Tensor& log_sum) {
        return Scaled(logits, logits_.scales, row, count)
            .sub_(log_sum.narrow(0, row, count).unsqueeze(1));
      };
      Block block = {.student = logps(logits_.student, log_sum_),
                     .teacher = logps(logits_.teacher, teacher_log_sum_),
                     .mixture = {}};
      block.mixture = block.teacher + std::log(beta);
      at::logaddexp_out(block.mixture, block.mixture, block.student + std::log1p(-beta));
      work(row, block);
    }
  }

  const Logits& logits_;
  const int64_t block_rows_;
  const at::Tensor log_sum_, teacher_log_sum_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LinearDivergenceLoss>> LinearDivergenceLoss::Create(
    const ops::MatrixRows& weight, const ops::MatrixRows& teacher_weight,
    const LinearDivergenceOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("weight", weight));
  TANDEM_RETURN_IF_ERROR(CheckOutputWeight("teacher_weight", teacher_weight));
  if (teacher_weight.size(0) != weight.size(0)) {
    return InvalidField("teacher_weight",
                        absl::StrCat("has a vocabulary of ", teacher_weight.size(0),
                                     ", the student's is ", weight.size(0)));
  }
  if (teacher_weight.scalar_type() != weight.scalar_type() ||
      teacher_weight.device() != weight.device()) {
    return InvalidField("teacher_weight", "must have the type and the device of the student's");
  }
  TANDEM_RETURN_IF_ERROR(CheckVocabularyShard(options.vocabulary, weight));
  TANDEM_RETURN_IF_ERROR(CheckSoftCap("soft_cap", options.soft_cap));
  TANDEM_RETURN_IF_ERROR(CheckSoftCap("teacher_soft_cap", options.teacher_soft_cap));
  std::unique_ptr<LinearDivergenceLoss> loss(new LinearDivergenceLoss);
  loss->vocabulary_ = options.vocabulary.WithRows(weight.size(0));
  loss->soft_cap_ = options.soft_cap;
  loss->teacher_soft_cap_ = options.teacher_soft_cap;
  loss->weight_ = weight;
  loss->teacher_weight_ = teacher_weight;
  loss->logits_type_ = at::toOpMathType(weight.scalar_type());
  loss->own_kernels_ = loss->logits_type_ == at::kFloat && weight.is_cpu() &&
                       ops::GetKernelPath() == ops::KernelPath::kAuto;
  TANDEM_RETURN_IF_ERROR(loss->PlanMemory(options.logits_chunk_bytes));
  return loss;
}

absl::Status LinearDivergenceLoss::PlanMemory(int64_t logits_chunk_bytes) {
  // Ranks exchange statistics chunk by chunk, so that all of them need the same chunks.
  const int64_t row_bytes =
      vocabulary_.most_rows * static_cast<int64_t>(c10::elementSize(logits_type_));
  // A row of each kind.
  const int64_t min_bytes = (kModels + kBlockCopies) * row_bytes;
  if (logits_chunk_bytes < min_bytes) {
    return InvalidField("logits_chunk_bytes", absl::StrCat("must be at least ", min_bytes,
                                                           " for two models with a vocabulary of ",
                                                           vocabulary_.most_rows));
  }
  const int64_t block_bytes = std::min(kBlockBytes, logits_chunk_bytes / (kModels + kBlockCopies));
  block_rows_ = std::max<int64_t>(1, block_bytes / row_bytes);
  const int64_t most_rows = logits_chunk_bytes / row_bytes;
  mixture_chunk_rows_ = (most_rows - kBlockCopies * block_rows_) / kModels;
  chunk_rows_ = own_kernels_ ? most_rows / kModels : mixture_chunk_rows_;
  return absl::OkStatus();
}

absl::Status LinearDivergenceLoss::Check(const at::Tensor& hidden, const at::Tensor& teacher_hidden,
                                         const DivergenceRows& rows,
                                         absl::Span<const double> scales) const {
  TANDEM_RETURN_IF_ERROR(CheckHidden("hidden", hidden, weight_));
  TANDEM_RETURN_IF_ERROR(CheckHidden("teacher_hidden", teacher_hidden, teacher_weight_));
  if (teacher_hidden.size(0) != hidden.size(0)) {
    return InvalidField("teacher_hidden", "must have as many rows as the student's");
  }
  TANDEM_RETURN_IF_ERROR(CheckTemperatures(rows.temperatures, rows.positions.size()));
  TANDEM_RETURN_IF_ERROR(
      CheckIndices("positions", rows.positions, hidden.size(0), "the hidden states"));
  return CheckScales(scales, rows.positions.size());
}

absl::StatusOr<std::vector<double>> LinearDivergenceLoss::ForwardBackward(
    const at::Tensor& hidden, const at::Tensor& teacher_hidden, const DivergenceRows& rows,
    const Divergence& divergence, absl::Span<const double> scales_of_rows,
    OutputGradients& gradients) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(Check(hidden, teacher_hidden, rows, scales_of_rows));
  std::vector<double> divergences;
  if (rows.positions.empty()) return divergences;

  const auto count = static_cast<int64_t>(rows.positions.size()), vocabulary = weight_.size(0);
  const at::ScalarType dtype = weight_.scalar_type();
  const at::TensorOptions options = weight_.options().dtype(logits_type_);
  const at::Tensor positions = CopyToDevice(rows.positions, weight_.device());
  const at::Tensor input = SelectRows(hidden, rows.positions, positions).to(dtype);
  const at::Tensor teacher_input = SelectRows(teacher_hidden, rows.positions, positions).to(dtype);
  at::Tensor scales;
  if (!rows.temperatures.empty()) {
    scales = CopyToDevice(rows.temperatures, options.device()).to(options).reciprocal_();
  }

  const at::Tensor weights = CopyToDevice(
      std::vector<double>(scales_of_rows.begin(), scales_of_rows.end()), weight_.device());
  const bool has_mixture = divergence.kind == DivergenceKind::kJensenShannon;
  const int64_t most_rows = has_mixture ? mixture_chunk_rows_ : chunk_rows_;
  const int64_t chunk_rows = EqualChunkRows(count, most_rows);
  // A mixture has no room for the buffer of the others.
  if (!buffer_.defined() || buffer_.size(1) < chunk_rows * vocabulary ||
      buffer_.size(1) > most_rows * vocabulary) {
    buffer_.reset();  // before there is another one
    buffer_ = at::empty({kModels, chunk_rows * vocabulary}, options);
  }
  for (int64_t begin = 0; begin < count; begin += chunk_rows) {
    const int64_t size = std::min(chunk_rows, count - begin);
    const auto rows_of = [&](const at::Tensor& x) { return x.narrow(0, begin, size); };
    const auto logits_of = [&](int64_t model) {
      return buffer_[model].narrow(0, 0, size * vocabulary).view({size, vocabulary});
    };
    const Logits logits = {.student = logits_of(0),
                           .teacher = logits_of(1),
                           .scales = scales.defined() ? rows_of(scales) : scales,
                           .divergence = divergence,
                           .soft_cap = soft_cap_};
    weight_.MultiplyInto(logits.student, rows_of(input));
    teacher_weight_.MultiplyInto(logits.teacher, rows_of(teacher_input));
    if (soft_cap_.has_value()) ops::SoftCap(logits.student, *soft_cap_);
    if (teacher_soft_cap_.has_value()) ops::SoftCap(logits.teacher, *teacher_soft_cap_);
    Statistics statistics =
        own_kernels_ ? CpuStatistics(logits) : AtenStatistics(logits, block_rows_);
    const bool forward = logits.is_forward();
    if (!vocabulary_.is_whole()) statistics = MergeRanks(statistics, forward, *vocabulary_.group);
    std::optional<MixtureDivergence> mixture;
    at::Tensor kls;  // to the mixture
    if (has_mixture) {
      mixture.emplace(logits, statistics, block_rows_);
      kls = mixture->Moments();
      if (!vocabulary_.is_whole()) kls = vocabulary_.group->Sum(kls);
    }
    const at::Tensor found = has_mixture ? kls[0] * (1 - divergence.beta) + kls[1] * divergence.beta
                                         : Divergences(statistics, forward);
    TANDEM_RETURN_IF_ERROR(AppendDivergences(found, begin, {&divergences}));

    if (!gradients.hidden.defined() && !gradients.weight.defined()) continue;
    if (has_mixture) {
      mixture->Gradient(kls[0], rows_of(weights), dtype);
    } else if (own_kernels_) {
      CpuGradient(logits, GradientsOf(statistics, logits, rows_of(weights)), dtype);
    } else {
      AtenGradient(logits, GradientsOf(statistics, logits, rows_of(weights)), dtype, block_rows_);
    }
    AddOutputGradients(GradientOf(logits.student, dtype), rows_of(input), weight_,
                       rows_of(positions), gradients);
  }
  return divergences;
}

}  // namespace tandem::loss
