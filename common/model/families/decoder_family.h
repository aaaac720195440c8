// The families whose model is a dense decoder: one implementation, configured by
// DecoderOptions. decoder.h computes it.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/model/config/config_keys.h"
#include "common/model/family.h"

namespace tandem {

// The names of a layer's norms of [hidden_size], without ".weight"; empty for those that the layer
// has not. A layer with norms of inputs alone calls the MLP's after the attention before it.
struct LayerNormNames {
  explicit LayerNormNames(const DecoderOptions& options) {
    if (options.pre_norm) {
      attention_input = "input_layernorm";
      mlp_input = options.post_norm ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    }
    if (options.post_norm) {
      attention_output = "post_attention_layernorm";
      mlp_output = "post_feedforward_layernorm";
    }
  }

  std::string attention_input, attention_output, mlp_input, mlp_output;
};

// Facts of a family that stand in the code of `transformers`, not in config.json.
struct TransformersClasses {
  // Whether layers with a window have a rotation of their own.
  bool layer_ropes = false;
  bool partial_rotary = false;  // as in RopeModel (rope_config.h)
  bool has_token_classifier = true;
  // The prefix of the sequence classifier's name, if it is not the family's.
  const char* classifier_prefix = nullptr;
};

class DecoderFamily : public Family {
 public:
  // Reads the family's own keys, of a model with `num_layers` layers, from fields that ObeyedKeys
  // returned.
  using OptionsFunction = absl::StatusOr<DecoderOptions> (*)(const ConfigFields& fields,
                                                             int64_t num_layers);

  // `keys` are those of the object that has the text model (family_keys.h).
  DecoderFamily(std::string model_type, std::string class_prefix, ConfigKeys keys,
                OptionsFunction options, const TransformersClasses& classes = {})
      : Family(std::move(model_type), std::move(class_prefix), classes.has_token_classifier,
               classes.classifier_prefix),
        keys_(std::move(keys)),
        options_(options),
        classes_(classes) {}

  std::vector<ConfigSection> Keys() const override;
  // Refuses what the tables of keys refuse, the rotations that rope_config.h lacks, and what the
  // family's OptionsFunction refuses.
  absl::Status ReadConfig(const ConfigFields& fields, ModelConfig& config) const override;
  std::vector<ParameterSpec> Parameters(const ModelConfig& config) const override;
  // Files of the model without its head lack the "model." of parameters, which `transformers` adds.
  std::string ParameterName(absl::string_view tensor) const override;
  std::vector<WeightFileSize> WeightFileSizes(const ModelConfig& config) const override;
  std::vector<StackedTensor> StackedTensors(const ModelConfig& config) const override;
  absl::Status CheckShards(const ModelConfig& config, int64_t shard_count, bool whole_experts,
                           absl::string_view field) const override;
  absl::Status CheckExpertShards(const ModelConfig& config, int64_t shard_count,
                                 absl::string_view field) const override;
  std::vector<LayerCache> CacheLayout(const ModelConfig& config,
                                      int64_t shard_count) const override;
  int64_t InferenceActivations(const ModelConfig& config, int64_t shard_count,
                               bool whole_experts) const override;
  int64_t TrainingActivationBytes(const ModelConfig& config, int64_t layer,
                                  int64_t shard_count) const override;
  bool KeepsTensor(const ModelConfig& config, absl::string_view name) const override;

 protected:
  const ConfigKeys& keys() const { return keys_; }

 private:
  const ConfigKeys keys_;
  const OptionsFunction options_;
  const TransformersClasses classes_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
