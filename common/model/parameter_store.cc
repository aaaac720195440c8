#include "common/model/parameter_store.h"

#include <ATen/ATen.h>

#include <numeric>

#include "common/ops/ops.h"

namespace tandem {

std::vector<at::Tensor> Projection::Forward(const at::Tensor& x) const {
  std::vector<at::Tensor> outputs;
  if (fused_weight.defined()) {
    const at::Tensor all = ops::Linear(x, fused_weight, fused_bias);
    int64_t begin = 0;
    for (const at::Tensor& weight : weights) {
      outputs.push_back(all.narrow(1, begin, weight.size(0)));
      begin += weight.size(0);
    }
    return outputs;
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(ops::Linear(x, weights[i], biases.empty() ? at::Tensor() : biases[i]));
  }
  return outputs;
}

void ParameterStore::Register(const std::string& name, const at::Tensor& tensor, Init init) {
  if (requires_grad_) tensor.set_requires_grad(true);
  parameters_.emplace_back(name, tensor);
  inits_.push_back(init);
}

at::Tensor ParameterStore::Add(const std::string& name, at::IntArrayRef shape, Init init) {
  at::Tensor tensor = at::empty(shape, at::kFloat);
  Register(name, tensor, init);
  return tensor;
}

Projection ParameterStore::AddProjection(const std::vector<std::string>& names,
                                         const std::vector<int64_t>& outs, int64_t in, bool bias) {
  Projection projection;
  const int64_t total = std::accumulate(outs.begin(), outs.end(), int64_t{0});
  if (!requires_grad_) {
    projection.fused_weight = at::empty({total, in}, at::kFloat);
    if (bias) projection.fused_bias = at::empty({total}, at::kFloat);
  }
  int64_t begin = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    projection.weights.push_back(requires_grad_
                                     ? at::empty({outs[i], in}, at::kFloat)
                                     : projection.fused_weight.narrow(0, begin, outs[i]));
    Register(names[i] + ".weight", projection.weights.back(), Init::kNormal);
    if (bias) {
      projection.biases.push_back(requires_grad_ ? at::empty({outs[i]}, at::kFloat)
                                                 : projection.fused_bias.narrow(0, begin, outs[i]));
      Register(names[i] + ".bias", projection.biases.back(), Init::kZeros);
    }
    begin += outs[i];
  }
  return projection;
}

}  // namespace tandem
