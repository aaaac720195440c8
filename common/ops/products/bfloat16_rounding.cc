#include "common/ops/products/bfloat16_rounding.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/kernels/cpu/packed_weight.h"
#include "common/ops/threads/parallel_for.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor RoundedCopy(const at::Tensor& x) {
  at::Tensor rounded = at::empty_like(x, at::MemoryFormat::Contiguous);
  CopyRounded(x.contiguous(), rounded);
  return rounded;
}

// Adding the difference of a rounded value and the value would have the same gradient, but makes a
// negative value that rounds to zero 0 instead of -0, and infinity NaN.
class RoundingFunction : public torch::autograd::Function<RoundingFunction> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return RoundedCopy(x); }
  static variable_list backward(AutogradContext*, variable_list dys) { return dys; }
};

}  // namespace

void CopyRounded(const at::Tensor& from, const at::Tensor& to) {
  constexpr int64_t kOperations = 4;  // of a value
  TORCH_CHECK(from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes(),
              "rounding needs contiguous tensors of one shape");
  const at::NoGradGuard no_grad;
  const float* const values = from.const_data_ptr<float>();
  float* const rounded = to.mutable_data_ptr<float>();
  ParallelFor(from.numel(), kOperations, [&](int64_t begin, int64_t end) {
    kernels::RoundToBfloat16(values + begin, end - begin, rounded + begin);
  });
  to.unsafeGetTensorImpl()->bump_version();  // autograd sees a change, as after copy_
}

at::Tensor Rounded(const at::Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad() ? RoundingFunction::apply(x)
                                                         : RoundedCopy(x);
}

}  // namespace tandem::ops
