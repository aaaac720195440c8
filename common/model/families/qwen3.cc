// Qwen3: queries and keys are normalised head by head.
#include "common/model/decoder_parameters.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

std::vector<ParameterSpec> Parameters(const ModelConfig& config) {
  return DenseDecoderParameters(
      config,
      {.qkv_bias = config.attention_bias, .output_bias = config.attention_bias, .qk_norm = true});
}

}  // namespace

Family Qwen3Family() { return {"qwen3", "Qwen3", Parameters}; }

}  // namespace tandem
