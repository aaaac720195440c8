// Qwen2 and Qwen2.5: queries, keys and values always have a bias, nothing else does.
#include "common/model/decoder_parameters.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

std::vector<ParameterSpec> Parameters(const ModelConfig& config) {
  return DenseDecoderParameters(config, {.qkv_bias = true});
}

}  // namespace

Family Qwen2Family() { return {"qwen2", "Qwen2", Parameters}; }

}  // namespace tandem
