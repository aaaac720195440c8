// Checks that config.json describes the weight files beside it. No torch.
#ifndef TANDEM_COMMON_MODEL_LOADING_WEIGHT_FILES_CHECK_H_
#define TANDEM_COMMON_MODEL_LOADING_WEIGHT_FILES_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "common/model/config/model_config.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem {

// Compares the sizes of `config` (Family::WeightFileSizes) with the files, so that no memory is
// taken, nor any plan made, for a model that is not there. INVALID_ARGUMENT naming the field
// ("config.json.num_hidden_layers"), or the tensor that should show it, and for names that no model
// of the family has, with the prefix that they begin with.
absl::Status CheckSizes(const ModelConfig& config, const SafetensorsDirectory& files);

// The same for a directory that is not open; also the errors of SafetensorsDirectory::Open.
absl::Status CheckSizes(const ModelConfig& config, const std::string& directory);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_WEIGHT_FILES_CHECK_H_
