// Families by Hugging Face `model_type`. A new family is one file in families/ plus its line in
// family_registry.cc.
#ifndef TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_
#define TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/backbone.h"
#include "common/model/model_config.h"
#include "common/model/parameter_store.h"

namespace tandem {

struct Family {
  std::string model_type;
  std::string class_prefix;  // "Llama": exports name <prefix>ForCausalLM
  // Declares the parameters in the store; errors name the config's field.
  absl::StatusOr<std::unique_ptr<Backbone>> (*build)(const ModelConfig&, ParameterStore&);
};

// UNIMPLEMENTED for "config.json.model_type" with the list of families there are.
absl::StatusOr<const Family*> FindFamily(absl::string_view model_type);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILY_REGISTRY_H_
