// Latent attention as a decoder family declares it (latent_attention.h computes it). No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_LATENT_ATTENTION_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILIES_LATENT_ATTENTION_FAMILY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/model_config.h"
#include "common/model/families/parameter_list.h"
#include "common/model/family.h"
#include "common/model/passes/layer_cache.h"

namespace tandem {

// Reads the keys of DeepSeek's attention. INVALID_ARGUMENT with the field's path for sizes that are
// wrong. Fields are those that ObeyedKeys returned, here and below.
absl::StatusOr<LatentAttentionOptions> ReadLatentAttention(const ConfigFields& fields);

// Sets head_dim, the width that is rotated. INVALID_ARGUMENT for another `head_dim`, and unless
// there are as many key heads as query heads; UNIMPLEMENTED for a scale of scores with a rope type
// other than yarn.
absl::Status ReadLatentHeads(const ConfigFields& fields, ModelConfig& config);

// The following need config.decoder.latent.

// Declares the parameters of one layer's attention.
void AddLatentAttention(const ModelConfig& config, const std::string& prefix, ParameterList& list);

// Returns the sizes of the attention that the weight files must confirm, in the layer of `prefix`.
std::vector<WeightFileSize> LatentFileSizes(const ModelConfig& config, const std::string& prefix);

// Returns what layers cache: for each token the latent and the rotated part of the key, the same in
// every shard.
std::vector<LayerCache> LatentCacheLayout(const ModelConfig& config);

// The parts of Family::InferenceActivations and Family::TrainingActivationBytes that belong to the
// attention, both in values per token.
int64_t LatentInferenceActivations(const ModelConfig& config, int64_t shard_count);
int64_t LatentTrainingActivations(const ModelConfig& config, int64_t shard_count);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_LATENT_ATTENTION_FAMILY_H_
