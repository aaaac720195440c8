// The parameters of a model under construction: families declare them, loading fills them.
#ifndef TANDEM_COMMON_MODEL_PARAMETER_STORE_H_
#define TANDEM_COMMON_MODEL_PARAMETER_STORE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/tensor/named_tensors.h"

namespace tandem {

// Linear maps of one input. Without gradients they share one buffer and `fused_*` is all of them,
// stacked in order, while `weights` and `biases` are views of it, so that an in-place update of a
// parameter is an update of both.
struct Projection {
  std::vector<at::Tensor> weights;  // [out_i, in]
  std::vector<at::Tensor> biases;   // [out_i]; empty without bias
  at::Tensor fused_weight;          // [sum of out_i, in] or undefined
  at::Tensor fused_bias;

  // x [T, in] -> one [T, out_i] a map; views of one tensor when fused.
  std::vector<at::Tensor> Forward(const at::Tensor& x) const;
};

class ParameterStore {
 public:
  enum class Init { kNormal, kOnes, kZeros };  // how `transformers` would initialise it

  explicit ParameterStore(bool requires_grad) : requires_grad_(requires_grad) {}

  // Declares one parameter and returns it, uninitialised.
  at::Tensor Add(const std::string& name, at::IntArrayRef shape, Init init);

  // Declares "<name_i>.weight" [outs[i], in] and, with `bias`, "<name_i>.bias".
  Projection AddProjection(const std::vector<std::string>& names, const std::vector<int64_t>& outs,
                           int64_t in, bool bias);

  const NamedTensors& parameters() const { return parameters_; }
  // Parallel to parameters().
  const std::vector<Init>& inits() const { return inits_; }

 private:
  void Register(const std::string& name, const at::Tensor& tensor, Init init);

  const bool requires_grad_;
  NamedTensors parameters_;
  std::vector<Init> inits_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETER_STORE_H_
