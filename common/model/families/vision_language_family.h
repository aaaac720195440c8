// The families with a vision tower before a dense decoder: Qwen2-VL and Qwen2.5-VL. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_VISION_LANGUAGE_FAMILY_H_
#define TANDEM_COMMON_MODEL_FAMILIES_VISION_LANGUAGE_FAMILY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/families/decoder_family.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

class VisionLanguageFamily : public DecoderFamily {
 public:
  // Reads the vision tower (read_vision_config.h).
  using VisionFunction = absl::StatusOr<VisionConfig> (*)(const ConfigFields& tower,
                                                          int64_t hidden_size);

  VisionLanguageFamily(std::string model_type, std::string class_prefix, ConfigKeys text_keys,
                       OptionsFunction options, ConfigKeys vision_keys, VisionFunction vision)
      : DecoderFamily(std::move(model_type), std::move(class_prefix), std::move(text_keys), options,
                      {.has_token_classifier = false}),
        vision_keys_(std::move(vision_keys)),
        vision_(vision) {}

  std::vector<ConfigSection> Keys() const override;
  // Reads the text model from `text_config`, or from config.json itself, as older files have it.
  absl::Status ReadConfig(const ConfigFields& fields, ModelConfig& config) const override;
  std::string language_model_class() const override {
    return class_prefix() + "ForConditionalGeneration";
  }
  // Files have "visual." or "model.visual.", "model." or "model.language_model."; those of the
  // model without its head "language_model.". Parameters have the names that `transformers` saves,
  // the first of each.
  std::string ParameterName(absl::string_view tensor) const override;
  std::vector<WeightFileSize> WeightFileSizes(const ModelConfig& config) const override;

 private:
  const ConfigKeys vision_keys_;
  const VisionFunction vision_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_VISION_LANGUAGE_FAMILY_H_
