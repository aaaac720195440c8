// Families by Hugging Face `model_type`. A new family is one file in families/ plus its line in
// family_registry.cc. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_
#define TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/model_config.h"
#include "common/model/parameter_spec.h"

namespace tandem {

struct Family {
  std::string model_type;
  std::string class_prefix;  // "Llama": exports name <prefix>ForCausalLM
  // Of the model without its head. Every family so far is a DenseDecoder.
  std::vector<ParameterSpec> (*parameters)(const ModelConfig&);
};

// UNIMPLEMENTED for "config.json.model_type" with the list of families there are.
absl::StatusOr<const Family*> FindFamily(absl::string_view model_type);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_
