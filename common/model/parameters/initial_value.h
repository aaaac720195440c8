// Random weights as `transformers` draws them.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <cstdint>

#include "common/base/checksum.h"
#include "common/model/config/lora.h"
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
    case Init::kLoraA: {
      const double bound = 1 / std::sqrt(static_cast<double>(spec.shape[1]));
      return at::empty(spec.shape, at::kFloat).uniform_(-bound, bound, generator);
    }
  }
  return {};
}

// Returns the initial value of a whole parameter of an adapter: of each the same, whatever else the
// model has.
inline at::Tensor InitialAdapter(const ParameterSpec& spec, const LoraOptions& options) {
  const uint64_t key = Xxh3_64(spec.name.data(), spec.name.size()) ^ options.seed;
  return InitialValue(spec, /*initializer_range=*/0, at::detail::createCPUGenerator(key));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_INITIAL_VALUE_H_
