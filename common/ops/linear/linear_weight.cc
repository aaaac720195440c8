#include "common/ops/linear/linear_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/linear/bfloat16_linear.h"
#include "common/ops/linear/linear_function.h"
#include "common/ops/ops.h"
#include "common/ops/products/bfloat16_rounding.h"
#include "common/ops/products/fixed_rows.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/products/parallel_linear.h"
#include "common/ops/shards/rank_sum.h"
#include "common/ops/shards/token_shards.h"

namespace tandem::ops {

LinearWeight::LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
                           std::vector<at::Tensor> biases, at::ScalarType compute_dtype,
                           bool rounds, at::Tensor copy)
    : stacked_(std::move(stacked)),
      bias_(std::move(bias)),
      weights_(std::move(weights)),
      biases_(std::move(biases)),
      compute_weight_(std::move(copy)),
      rounds_(rounds),
      rounds_inputs_(rounds && compute_dtype == at::kBFloat16) {
  const at::NoGradGuard no_grad;
  // If the types are the same, these are the stack itself.
  if (rounds_inputs_) {
    compute_weight_ = Bfloat16Rows(stacked_.size(0), stacked_.size(1));
  } else if (!compute_weight_.defined()) {
    compute_weight_ = stacked_.detach().to(compute_dtype, /*non_blocking=*/false, /*copy=*/rounds);
  }
  if (bias_.defined()) compute_bias_ = rounds ? bias_.detach() : bias_.detach().to(compute_dtype);
  has_copy_ = !compute_weight_.is_alias_of(stacked_);
  if (has_copy_) RefreshCopy();
}

LinearWeight::LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
                           std::vector<at::Tensor> biases, at::Tensor compute_weight,
                           at::Tensor compute_bias)
    : stacked_(std::move(stacked)),
      bias_(std::move(bias)),
      weights_(std::move(weights)),
      biases_(std::move(biases)),
      compute_weight_(std::move(compute_weight)),
      compute_bias_(std::move(compute_bias)) {}

LinearWeight::LinearWeight(std::shared_ptr<const PackedWeight> packed, at::Tensor bias,
                           std::vector<at::Tensor> biases, bool rounds_inputs)
    : bias_(std::move(bias)),
      biases_(std::move(biases)),
      packed_(std::move(packed)),
      compute_bias_(bias_),
      rounds_inputs_(rounds_inputs) {}

void LinearWeight::OnWeightsChanged() {
  if (has_copy_) RefreshCopy();
}

void LinearWeight::RefreshCopy() {
  const at::NoGradGuard no_grad;
  if (rounds_ && !rounds_inputs_) {
    CopyRounded(stacked_, compute_weight_);
  } else {
    compute_weight_.copy_(stacked_);
    if (bias_.defined() && !rounds_) compute_bias_.copy_(bias_);
  }
  copied_version_ = stacked_._version();
}

void LinearWeight::CheckFresh() const {
  TORCH_CHECK(!has_copy_ || copied_version_ == stacked_._version(),
              "the weights have changed, but OnWeightsChanged() was not called");
}

const at::Tensor& LinearWeight::compute_weight() const {
  TORCH_CHECK(packed_ == nullptr, "the weight is packed, so it has no dense matrix");
  CheckFresh();
  return compute_weight_;
}

at::Tensor LinearWeight::Infer(const at::Tensor& x, const at::Tensor& bias) const {
  CheckFresh();
  if (packed_ != nullptr) return packed_->Linear(Input(x), bias, packed_->out());
  if (rounds_inputs_) return Bfloat16Linear(Input(x), compute_weight_, bias);
  return Linear(x, compute_weight_, bias);
}

at::Tensor LinearWeight::Input(const at::Tensor& x) const {
  return rounds_inputs_ ? RoundedRows(x) : x;
}

void LinearWeight::MultiplyTile(const LinearTile& tile, const at::Tensor& input,
                                const at::Tensor& y) const {
  if (packed_ != nullptr) return packed_->MultiplyTile(tile, input, y);
  const auto multiply = [&]<typename Number>(void (*kernel)(const kernels::LinearArgs<Number>&)) {
    const auto data = [](const at::Tensor& of) {
      return static_cast<const Number*>(of.const_data_ptr());
    };
    const kernels::LinearArgs<Number> whole = {
        .x = data(input),
        .x_stride = input.stride(0),
        .w = data(compute_weight()),
        .bias = nullptr,
        .y = y.mutable_data_ptr<float>(),
        .y_stride = out(),
        .rows = input.size(0),
        .in = compute_weight_.stride(0),  // with the padding of bf16
        .out_begin = 0,
        .out_end = out(),
        .accumulate = false};
    kernel(TileOf(whole, tile));
  };
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  if (rounds_inputs_) return multiply(cpu.bfloat16_linear);
  multiply(cpu.linear);
}

at::Tensor LinearWeight::Logits(const at::Tensor& x, int64_t outs) const {
  TORCH_CHECK(!at::GradMode::is_enabled(), "some columns of a map have no gradient");
  CheckFresh();
  if (packed_ != nullptr) return packed_->Linear(Input(x), compute_bias_, outs);
  // A view is an allocation, which a pass of decoding does without.
  const bool whole = outs == compute_weight_.size(0);
  const at::Tensor weight = whole ? compute_weight_ : compute_weight_.narrow(0, 0, outs);
  const at::Tensor bias =
      whole || !bias_.defined() ? compute_bias_ : compute_bias_.narrow(0, 0, outs);
  if (rounds_inputs_) return Bfloat16Linear(Input(x), weight, bias);
  // A GPU writes the sums of bfloat16 products as they are.
  const bool has_float_sums = x.is_cuda() && weight.scalar_type() == at::kBFloat16;
  if (!has_float_sums || bias.defined()) return Linear(x, weight, bias);
  if (ProductRows() > 0) return LinearOfFixedRows(x, weight, bias, at::kFloat);
  return MatrixProduct(x, weight.t());
}

at::Tensor LinearWeight::Base(const at::Tensor& x) const {
  if (!at::GradMode::is_enabled()) return Infer(x, compute_bias_);
  if (packed_ != nullptr) return DifferentiableLinear(x, packed_, compute_bias_);
  CheckFresh();
  return DifferentiableLinear(x, weights_, biases_, compute_weight_, compute_bias_);
}

at::Tensor LinearWeight::Forward(const at::Tensor& x) const { return Adapted(Base(x), x); }

at::Tensor LinearWeight::Adapted(const at::Tensor& y, const at::Tensor& x) const {
  const LowRankAdapter* const adapter = this->adapter();
  if (adapter == nullptr) return y;
  const at::Tensor low = adapter->a->Forward(x) * adapter->scale;
  return AddAdapters(y, *adapter, [&](size_t i) {
    return adapter->maps[i].b->Forward(
        low.narrow(1, static_cast<int64_t>(i) * adapter->rank, adapter->rank));
  });
}

at::Tensor LinearWeight::BaseFloat32(const at::Tensor& x) const {
  if (packed_ != nullptr && rounds_inputs_) return packed_->Linear(x, compute_bias_, out());
  if (packed_ != nullptr || compute_weight_.scalar_type() == at::kFloat) return Base(x);
  CheckFresh();
  const at::Tensor wide = x.to(at::kFloat), weight = compute_weight_.to(at::kFloat);
  const at::Tensor bias = bias_.defined() ? compute_bias_.to(at::kFloat) : at::Tensor();
  if (!at::GradMode::is_enabled()) return Linear(wide, weight, bias);
  return DifferentiableLinear(wide, weights_, biases_, weight, bias);
}

at::Tensor LinearWeight::ForwardAdd(const at::Tensor& residual, const at::Tensor& x) const {
  if (at::GradMode::is_enabled()) return residual + Forward(x);
  if (adapter() != nullptr) return residual.add_(Forward(x));
  CheckFresh();
  if (packed_ != nullptr) return packed_->LinearAdd(residual, Input(x), compute_bias_);
  if (rounds_inputs_) return Bfloat16LinearAdd(residual, Input(x), compute_weight_, compute_bias_);
  return LinearAdd(residual, x, compute_weight_, compute_bias_);
}

at::Tensor LinearWeight::ForwardShard(const at::Tensor& x,
                                      const std::shared_ptr<TensorParallelGroup>& group) const {
  const auto partial = [&] {
    if (!at::GradMode::is_enabled()) return Infer(x, /*bias=*/{});
    if (packed_ != nullptr) return DifferentiableLinear(x, packed_, /*bias=*/{});
    CheckFresh();
    return DifferentiableLinear(x, weights_, {}, compute_weight_, {});
  };
  return WithBias(ScatterSum(Adapted(partial(), x), group));
}

at::Tensor LinearWeight::ForwardSum(const at::Tensor& x,
                                    const std::shared_ptr<TensorParallelGroup>& group) const {
  TORCH_CHECK(!at::GradMode::is_enabled(), "a map that every rank sums has no gradient");
  return WithBias(SumInRankOrder(Adapted(Infer(x, /*bias=*/{}), x), group));
}

at::Tensor LinearWeight::WithBias(const at::Tensor& sum) const {
  if (!bias_.defined()) return sum;
  // In the type of the master, so that the gradient of the bias is summed in float32.
  const at::Tensor& bias = biases_.front();
  return (sum.to(bias.scalar_type()) + bias).to(sum.scalar_type());
}

}  // namespace tandem::ops
