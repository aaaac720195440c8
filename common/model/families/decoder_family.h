// The families whose model is a dense decoder: one implementation, configured by
// DecoderOptions. decoder.h computes it.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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
  double rms_norm_eps = 1e-6;                      // where config.json has none
  bool tie_word_embeddings = false;                // the same
  std::optional<int64_t> head_dim = std::nullopt;  // the same; std::nullopt: hidden_size over heads
  // The key of the MLP's activation, and the one that the family computes, its default.
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  // Whether layers with a window have a rotation of their own.
  bool layer_ropes = false;
  // As in RopeModel (rope_config.h).
  bool partial_rotary = false;
  std::optional<double> original_max_position_embeddings = std::nullopt;
  bool has_token_classifier = true;
  // The prefix of the sequence classifier's name, if it is not the family's.
  const char* classifier_prefix = nullptr;
};

class DecoderFamily : public Family {
 public:
  // Reads the family's own keys of config.json, of a model with `num_layers` layers.
  using OptionsFunction = absl::StatusOr<DecoderOptions> (*)(const ConfigFields& fields,
                                                             int64_t num_layers);

  DecoderFamily(std::string model_type, std::string class_prefix, OptionsFunction options,
                const TransformersClasses& classes = {})
      : Family(std::move(model_type), std::move(class_prefix), classes.has_token_classifier,
               classes.classifier_prefix),
        options_(options),
        classes_(classes) {}

  // Refuses activations other than the family's, the rotations that rope_config.h lacks, and what
  // the family's OptionsFunction refuses.
  absl::Status ReadConfig(const ConfigFields& fields, ModelConfig& config) const override;
  std::vector<ParameterSpec> Parameters(const ModelConfig& config) const override;
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
  BackboneKind backbone() const override { return BackboneKind::kDecoder; }

 private:
  const OptionsFunction options_;
  const TransformersClasses classes_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_DECODER_FAMILY_H_
