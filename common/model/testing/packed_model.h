// Models with packed weights, and their dense twins.
#ifndef TANDEM_COMMON_MODEL_TESTING_PACKED_MODEL_H_
#define TANDEM_COMMON_MODEL_TESTING_PACKED_MODEL_H_

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "common/kernels/weight_format.h"
#include "common/model/model.h"
#include "common/model/parameters/parameter.h"

namespace tandem {

inline constexpr kernels::WeightFormat kPackedFormats[] = {
    kernels::WeightFormat::kFloat32, kernels::WeightFormat::kBfloat16, kernels::WeightFormat::kInt8,
    kernels::WeightFormat::kInt4};

// Random values for all parameters of a model, norms and biases included.
inline NamedTensors RandomParameters(const Model& model, int64_t seed) {
  at::manual_seed(seed);
  NamedTensors tensors;
  for (const Parameter& parameter : model.DeclaredParameters()) {
    at::Tensor value = at::randn(parameter.spec.shape) * 0.2;
    if (parameter.spec.init == Init::kOnes) value += 1;
    tensors.emplace_back(parameter.spec.name, value);
  }
  return tensors;
}

// Gives `dense`, a model of the same shape and shard, the values that `packed` computes with.
inline void CopyComputedValues(const Model& packed, const Model& dense) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < packed.DeclaredParameters().size(); ++i) {
    const Parameter& from = packed.DeclaredParameters()[i];
    if (from.held()) dense.DeclaredParameters()[i].value.copy_(from.ComputedValue());
  }
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_PACKED_MODEL_H_
