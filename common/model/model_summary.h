// A loaded model as servers report it. Plain data, no tensors.
#ifndef TANDEM_COMMON_MODEL_MODEL_SUMMARY_H_
#define TANDEM_COMMON_MODEL_MODEL_SUMMARY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/model/config/lora.h"
#include "common/model/config/quantization.h"
#include "common/model/vision/vision_config.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct ModelSummary {
  std::string path;           // directory it was loaded from
  std::string model_type;     // "llama", "qwen2", ...
  int64_t vocab_size = 0;     // rows of the embedding
  int64_t num_token_ids = 0;  // at most vocab_size: the other rows are padding
  int64_t num_parameters = 0;
  int64_t num_trainable_parameters = 0;  // all but the frozen ones; 0 where nothing trains
  int64_t max_model_len = 0;             // longest sequence that the engine accepts
  std::vector<int64_t> eos_token_ids;
  std::optional<VisionConfig> vision = std::nullopt;  // nullopt: the model takes no images
  std::string vocabulary_digest;  // Vocabulary::Digest; empty without a tokenizer.json
  DType dtype = DType::kFloat32;  // of the linear maps, unless they are quantised
  Quantization quantization = Quantization::kNone;
  LoraOptions lora = {};  // enabled() if the model has adapters
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_MODEL_SUMMARY_H_
