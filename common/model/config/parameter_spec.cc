#include "common/model/config/parameter_spec.h"

#include <functional>
#include <numeric>

#include "common/base/errors/status_macros.h"
#include "common/model/family.h"

namespace tandem {

int64_t ParameterSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const ModelConfig& config,
                                                           const HeadOptions& head) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  std::vector<ParameterSpec> specs = family->Parameters(config);
  const int64_t last = config.LastBlock();
  if (head.kind == HeadKind::kLm && !head.tied) {
    specs.push_back({.name = kLmHeadName,
                     .shape = {config.vocab_size, config.hidden_size},
                     .shard_axis = 0,
                     .block = last});
  } else if (head.kind == HeadKind::kValue) {
    specs.push_back({.name = kValueHeadWeight, .shape = {1, config.hidden_size}, .block = last});
    if (head.bias) {
      specs.push_back({.name = kValueHeadBias, .shape = {1}, .init = Init::kZeros, .block = last});
    }
  }
  return specs;
}

}  // namespace tandem
