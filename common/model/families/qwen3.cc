// Qwen3: queries and keys are normalised head by head.
#include <memory>

#include "common/model/decoder.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

absl::StatusOr<std::unique_ptr<Backbone>> Build(const ModelConfig& config, ParameterStore& store) {
  const DecoderOptions options = {
      .qkv_bias = config.attention_bias, .output_bias = config.attention_bias, .qk_norm = true};
  return std::make_unique<DenseDecoder>(config, options, store);
}

}  // namespace

Family Qwen3Family() { return {"qwen3", "Qwen3", Build}; }

}  // namespace tandem
