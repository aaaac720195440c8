// LinearCrossEntropyLoss: gradient in forward (mode B), in ATen operations.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/loss/fused_output_loss.h"

namespace tandem::loss {
namespace {

// Bytes of one block of rows on the CPU: it is read and written some ten times, so it should stay
// in cache. Elsewhere a block is a chunk: its statistics are one wait for the device.
constexpr int64_t kBlockBytes = 4 << 20;

const char* ImplName(LossImpl impl) {
  switch (impl) {
    case LossImpl::kAuto:
      return "auto";
    case LossImpl::kCce:
      return "cce";
    case LossImpl::kTorchCompile:
      return "torch_compile";
    case LossImpl::kPytorch:
      return "pytorch";
  }
  return "unknown";
}

// Statistics of one block of rows of logits.
struct BlockStatistics {
  at::Tensor sum;     // [n, 1] sum of exp(z - max)
  at::Tensor mean_z;  // [n, 1] sum_j p_j (z_j - max)
};

// Turns `z` [n, V] into z - max, `exponentials` [n, V] into its exponential, and `products` [n, V]
// into the product of the two.
BlockStatistics Statistics(at::Tensor& z, at::Tensor& exponentials, at::Tensor& products,
                           const at::Tensor& labels, double* logprobs, double* entropies) {
  z.sub_(z.amax(1, /*keepdim=*/true));
  at::exp_out(exponentials, z);
  BlockStatistics block;
  block.sum = exponentials.sum(1, /*keepdim=*/true);
  // A product and a sum: MKL's dot products of rows take ten times as long.
  block.mean_z = at::mul_out(products, exponentials, z).sum(1, /*keepdim=*/true).div_(block.sum);
  const at::Tensor log_sum = block.sum.log();
  const at::Tensor logprob = z.gather(1, labels.unsqueeze(1)) - log_sum;
  const at::Tensor entropy = log_sum - block.mean_z;
  const at::Tensor host = at::cat({logprob, entropy}, 1).t().to(at::kCPU, at::kDouble).contiguous();
  const int64_t rows = z.size(0);
  std::copy_n(host.data_ptr<double>(), rows, logprobs);
  std::copy_n(host.data_ptr<double>() + rows, rows, entropies);
  return block;
}

// Copies of host numbers on the device of `like`. Pageable memory is staged before the call
// returns, so there is nothing to wait for.
at::Tensor Column(const std::vector<double>& numbers, const at::Tensor& like) {
  return at::from_blob(const_cast<double*>(numbers.data()),
                       {static_cast<int64_t>(numbers.size()), 1}, at::kDouble)
      .to(like.options().requires_grad(false), /*non_blocking=*/true, /*copy=*/true);
}

at::Tensor Indices(const std::vector<int64_t>& numbers, const at::Tensor& like) {
  return at::from_blob(const_cast<int64_t*>(numbers.data()), {static_cast<int64_t>(numbers.size())},
                       at::kLong)
      .to(like.device(), /*non_blocking=*/true);
}

// a b in `type`, accumulated in it.
at::Tensor Product(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  if (a.is_cuda() && a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16) {
    return at::mm(a, b, type);
  }
  return at::mm(a.to(type), b.to(type));
}

absl::Status CheckRange(absl::Span<const int64_t> numbers, int64_t end, absl::string_view name,
                        absl::string_view outside) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0 || numbers[i] >= end) {
      return InvalidField(absl::StrCat(name, "[", i, "]"),
                          absl::StrCat(numbers[i], " is outside ", outside));
    }
  }
  return absl::OkStatus();
}

// Overwrites `z` (holding z - max) by the gradient of the logits. The temperature is already in the
// coefficients.
void LogitGradient(at::Tensor& z, at::Tensor& exponentials, const BlockStatistics& block,
                   const at::Tensor& labels, const std::vector<double>& logprob_coefficients,
                   const std::vector<double>& entropy_coefficients) {
  const at::Tensor c = Column(logprob_coefficients, z);
  const bool with_entropy = std::any_of(entropy_coefficients.begin(), entropy_coefficients.end(),
                                        [](double e) { return e != 0; });
  if (with_entropy) {
    const at::Tensor e = Column(entropy_coefficients, z);
    z.mul_(e.neg()).add_(e * block.mean_z - c).mul_(exponentials.div_(block.sum));
  } else {
    at::mul_out(z, exponentials, c.neg().div_(block.sum));
  }
  z.scatter_add_(1, labels.unsqueeze(1), c);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LinearCrossEntropyLoss>> LinearCrossEntropyLoss::Create(
    at::Tensor weight, at::Tensor bias, const LinearCrossEntropyOptions& options) {
  if (!weight.defined() || weight.dim() != 2 || !weight.is_contiguous()) {
    return InvalidField("weight", "must be a contiguous [V, H] matrix");
  }
  const at::ScalarType type = weight.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16) {
    return FieldError(absl::StatusCode::kUnimplemented, "weight",
                      "only float32, float64 and bfloat16 output layers are there yet");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    return InvalidField("bias", "must be [V]");
  }
  const at::ScalarType logits_type = at::toOpMathType(type);
  const int64_t row_bytes = weight.size(0) * static_cast<int64_t>(c10::elementSize(logits_type));
  if (options.logits_chunk_bytes < 3 * row_bytes) {
    return InvalidField(
        "logits_chunk_bytes",
        absl::StrCat("must be at least ", 3 * row_bytes, " for a vocabulary of ", weight.size(0)));
  }
  if (options.chunk_size < 1) return InvalidField("chunk_size", "must be positive");

  std::unique_ptr<LinearCrossEntropyLoss> loss(new LinearCrossEntropyLoss);
  // `auto` takes the first of cce, torch_compile, pytorch that is available, and asked for none.
  if (options.impl == LossImpl::kCce || options.impl == LossImpl::kTorchCompile) {
    loss->fallback_warning_ = absl::StrCat("fused output loss: implementation '",
                                           ImplName(options.impl), "' is not part of this build; '",
                                           ImplName(LossImpl::kPytorch), "' is used instead");
  }
  const int64_t budget_rows = options.logits_chunk_bytes / row_bytes;
  loss->block_rows_ = std::clamp<int64_t>(weight.is_cpu() ? kBlockBytes / row_bytes : budget_rows,
                                          1, std::min(options.chunk_size, budget_rows / 3));
  loss->chunk_rows_ = std::min(options.chunk_size, budget_rows - 2 * loss->block_rows_);
  loss->logits_type_ = logits_type;
  loss->weight_ = weight.detach();
  loss->bias_ = bias.defined() ? bias.detach() : bias;
  return loss;
}

absl::Status LinearCrossEntropyLoss::CheckRows(const at::Tensor& hidden,
                                               const OutputRows& rows) const {
  if (hidden.dim() != 2 || hidden.size(1) != weight_.size(1)) {
    return InvalidField("hidden", "must be [T, H] with the H of the output layer");
  }
  if (hidden.scalar_type() != weight_.scalar_type() &&
      !(hidden.scalar_type() == at::kBFloat16 && weight_.scalar_type() == at::kFloat)) {
    return InvalidField("hidden", "must have the type of the output layer, or bfloat16");
  }
  const size_t count = rows.positions.size();
  if (rows.labels.size() != count)
    return InvalidField("labels", "must have one entry per position");
  if (!rows.temperatures.empty() && rows.temperatures.size() != count) {
    return InvalidField("temperatures", "must be empty or have one entry per position");
  }
  for (double temperature : rows.temperatures) {
    if (!(temperature > 0)) return InvalidField("temperatures", "must be positive");
  }
  TANDEM_RETURN_IF_ERROR(CheckRange(rows.labels, weight_.size(0), "labels", "the vocabulary"));
  return CheckRange(rows.positions, hidden.size(0), "positions", "the hidden states");
}

void LinearCrossEntropyLoss::EnsureWorkspace() {
  if (logits_.defined()) return;
  const auto options = weight_.options().dtype(logits_type_).requires_grad(false);
  logits_ = at::empty({chunk_rows_, weight_.size(0)}, options);
  exponentials_ = at::empty({block_rows_, weight_.size(0)}, options);
  products_ = at::empty_like(exponentials_);
}

absl::Status LinearCrossEntropyLoss::Run(const at::Tensor& hidden, const OutputRows& rows,
                                         const TokenLossFunction* function,
                                         OutputGradients* gradients, RowStatistics* statistics) {
  const at::NoGradGuard no_grad;
  TANDEM_RETURN_IF_ERROR(CheckRows(hidden, rows));
  EnsureWorkspace();
  const auto count = static_cast<int64_t>(rows.positions.size());
  bool every_row = count == hidden.size(0);
  for (int64_t i = 0; i < count && every_row; ++i) every_row = rows.positions[i] == i;
  const at::Tensor all_positions = Indices(rows.positions, weight_);
  const at::Tensor all_labels = Indices(rows.labels, weight_);
  std::vector<double> logprobs, entropies, c, e;
  for (int64_t begin = 0; begin < count; begin += chunk_rows_) {
    const int64_t n = std::min(chunk_rows_, count - begin);
    const at::Tensor positions = all_positions.narrow(0, begin, n);
    const at::Tensor labels = all_labels.narrow(0, begin, n);
    const at::Tensor input =
        every_row ? hidden.narrow(0, begin, n) : hidden.index_select(0, positions);
    at::Tensor logits = logits_.narrow(0, 0, n);
    if (weight_.scalar_type() != logits_type_) {
      logits.copy_(Product(input, weight_.t(), logits_type_));
      if (bias_.defined()) logits.add_(bias_);
    } else if (bias_.defined()) {
      at::addmm_out(logits, bias_, input.to(logits_type_), weight_.t());
    } else {
      at::mm_out(logits, input.to(logits_type_), weight_.t());
    }

    for (int64_t row = 0; row < n; row += block_rows_) {
      const int64_t block_size = std::min(block_rows_, n - row);
      const auto first = static_cast<size_t>(begin + row);
      const auto size = static_cast<size_t>(block_size);
      at::Tensor z = logits.narrow(0, row, block_size);
      at::Tensor exponentials = exponentials_.narrow(0, 0, block_size);
      at::Tensor products = products_.narrow(0, 0, block_size);
      const at::Tensor block_labels = labels.narrow(0, row, block_size);
      std::vector<double> inverse_temperatures;
      if (!rows.temperatures.empty()) {
        for (size_t i = 0; i < size; ++i) {
          inverse_temperatures.push_back(1.0 / rows.temperatures[first + i]);
        }
        z.mul_(Column(inverse_temperatures, z));
      }
      logprobs.resize(size);
      entropies.resize(size);
      const BlockStatistics block =
          Statistics(z, exponentials, products, block_labels, logprobs.data(), entropies.data());
      if (statistics != nullptr) {
        statistics->logprobs.insert(statistics->logprobs.end(), logprobs.begin(), logprobs.end());
        statistics->entropies.insert(statistics->entropies.end(), entropies.begin(),
                                     entropies.end());
      }
      if (function == nullptr) continue;
      c.assign(size, 0.0);
      e.assign(size, 0.0);
      TANDEM_RETURN_IF_ERROR((*function)(static_cast<int64_t>(first), logprobs, entropies,
                                         absl::MakeSpan(c), absl::MakeSpan(e)));
      for (size_t i = 0; i < inverse_temperatures.size(); ++i) {
        c[i] *= inverse_temperatures[i];
        e[i] *= inverse_temperatures[i];
      }
      LogitGradient(z, exponentials, block, block_labels, c, e);
    }

    if (gradients == nullptr) continue;
    // Products of bf16 take bf16: the gradient of the logits is rounded as autograd would round it.
    const at::Tensor dz = logits.to(weight_.scalar_type());
    if (gradients->hidden.defined()) {
      gradients->hidden.index_add_(
          0, positions, Product(dz, weight_, logits_type_).to(gradients->hidden.scalar_type()));
    }
    if (gradients->weight.defined()) {
      if (dz.scalar_type() == logits_type_) {
        gradients->weight.addmm_(dz.t(), input.to(logits_type_));
      } else {
        gradients->weight.add_(Product(dz.t(), input, logits_type_));
      }
    }
    if (gradients->bias.defined()) gradients->bias.add_(logits.sum(0));
  }
  return absl::OkStatus();
}

absl::Status LinearCrossEntropyLoss::ForwardBackward(const at::Tensor& hidden,
                                                     const OutputRows& rows,
                                                     TokenLossFunction function,
                                                     OutputGradients& gradients) {
  return Run(hidden, rows, &function, &gradients, nullptr);
}

absl::StatusOr<RowStatistics> LinearCrossEntropyLoss::LogProbs(const at::Tensor& hidden,
                                                               const OutputRows& rows) {
  RowStatistics statistics;
  TANDEM_RETURN_IF_ERROR(Run(hidden, rows, nullptr, nullptr, &statistics));
  return statistics;
}

}  // namespace tandem::loss
