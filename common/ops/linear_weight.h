// The weight behind every linear map and every head, and the one place where it is multiplied.
#ifndef TANDEM_COMMON_OPS_LINEAR_WEIGHT_H_
#define TANDEM_COMMON_OPS_LINEAR_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/ops/tensor_parallel_group.h"

namespace tandem::ops {

// One or several maps of one input (queries, keys and values), stacked in one matrix so that they
// are one product. The parameters are the *masters*: views of the stack, one per map. Where the
// computation has another type than the masters (bf16 over fp32), the products use a copy in that
// type, which OnWeightsChanged() refreshes; using it without is an error, never an old result.
class LinearWeight {
 public:
  // `stacked` [sum of outs, in] and `bias` [sum of outs] (or undefined) hold the maps one after the
  // other; `weights` [outs[i], in] and `biases` (empty, or [outs[i]]) are the parameters inside
  // them: leaves where they train.
  LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
               std::vector<at::Tensor> biases, at::ScalarType compute_dtype);

  // x [T, in] in the computation's type -> [T, sum of outs], the maps side by side. With autograd,
  // gradients of the masters have the masters' type.
  at::Tensor Forward(const at::Tensor& x) const;
  // residual + Forward(x), as ops::LinearAdd: without autograd `residual` is overwritten.
  at::Tensor ForwardAdd(const at::Tensor& residual, const at::Tensor& x) const;
  // The same by the ranks of a group that cut one map by input: x [T, in / n] and the weight are
  // this rank's columns, and `residual` and the result its share of the tokens
  // (common/ops/token_shares.h). The bias is added once, to the sum. `residual` stays as it is.
  at::Tensor ForwardAddShare(const at::Tensor& residual, const at::Tensor& x,
                             const std::shared_ptr<TensorParallelGroup>& group) const;
  // The same where every rank keeps all tokens: `residual` and the result are [T, out]. No
  // autograd.
  at::Tensor ForwardAddSum(const at::Tensor& residual, const at::Tensor& x,
                           TensorParallelGroup& group) const;

  // The values of the masters have changed.
  void OnWeightsChanged();

  // What the products use: [sum of outs, in] in the computation's type, without autograd. The
  // storage stays the same for the life of the object.
  const at::Tensor& compute_weight() const;

 private:
  void CheckFresh() const;
  // Of a single map.
  at::Tensor WithBias(const at::Tensor& sum) const;

  at::Tensor stacked_, bias_;
  std::vector<at::Tensor> weights_, biases_;
  at::Tensor compute_weight_, compute_bias_;  // stacked_ and bias_ themselves in the same type
  bool has_copy_ = false;
  int64_t copied_version_ = 0;  // of the stack, as autograd counts its changes
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_WEIGHT_H_
