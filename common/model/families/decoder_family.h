// The families whose model is a dense decoder: one implementation, configured by
// DecoderOptions. decoder.h computes it.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/model/family.h"

namespace tandem {

// The names of a layer's norms of [hidden_size] for attention and MLP, without ".weight".
struct LayerNormNames {
  explicit LayerNormNames(const DecoderOptions& options) {
    if (options.post_norm) {
      attention = "post_attention_layernorm";
      mlp = "post_feedforward_layernorm";
    }
  }

  const char* attention = "input_layernorm";
  const char* mlp = "post_attention_layernorm";
};

// Facts of a family that stand in the code of `transformers`, not in config.json.
struct TransformersClasses {
  double rms_norm_eps = 1e-6;  // where config.json has none
  bool has_token_classifier = true;
};

class DecoderFamily : public Family {
 public:
  // Reads the family's own keys of config.json, of a model with `num_layers` layers.
  using OptionsFunction = absl::StatusOr<DecoderOptions> (*)(const ConfigFields& fields,
                                                             int64_t num_layers);

  DecoderFamily(std::string model_type, std::string class_prefix, OptionsFunction options,
                const TransformersClasses& classes = {})
      : Family(std::move(model_type), std::move(class_prefix), classes.has_token_classifier),
        options_(options),
        default_rms_norm_eps_(classes.rms_norm_eps) {}

  // Refuses hidden_act other than silu, partial rotary, the rope types that rope_config.h lacks,
  // and what the family's OptionsFunction refuses.
  absl::Status ReadConfig(const ConfigFields& fields, ModelConfig& config) const override;
  std::vector<ParameterSpec> Parameters(const ModelConfig& config) const override;
  std::vector<WeightFileSize> WeightFileSizes(const ModelConfig& config) const override;
  std::vector<StackedTensor> StackedTensors(const ModelConfig& config) const override;
  absl::Status CheckShards(const ModelConfig& config, int64_t shard_count,
                           absl::string_view field) const override;
  std::vector<LayerCache> CacheLayout(const ModelConfig& config,
                                      int64_t shard_count) const override;
  int64_t InferenceActivations(const ModelConfig& config, int64_t shard_count) const override;
  int64_t TrainingActivationBytes(const ModelConfig& config, int64_t layer,
                                  int64_t shard_count) const override;
  BackboneKind backbone() const override { return BackboneKind::kDecoder; }

 private:
  const OptionsFunction options_;
  const double default_rms_norm_eps_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
