// Random weights as `transformers` draws them.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_

#include <ATen/ATen.h>

#include "common/model/config/parameter_spec.h"

namespace tandem {

// Returns the initial value of a whole parameter, in float32 on the host.
inline at::Tensor InitialValue(const ParameterSpec& spec, double initializer_range,
                               const at::Generator& generator) {
  switch (spec.init) {
    case Init::kNormal:
      return at::empty(spec.shape, at::kFloat).normal_(0.0, initializer_range, generator);
    case Init::kOnes:
      return at::ones(spec.shape, at::kFloat);
    case Init::kZeros:
      return at::zeros(spec.shape, at::kFloat);
  }
  return {};
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_
