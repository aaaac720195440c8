// Llama (and SmolLM2): attention_bias covers the output projection too.
#include "common/model/decoder_parameters.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

std::vector<ParameterSpec> Parameters(const ModelConfig& config) {
  return DenseDecoderParameters(config, {.qkv_bias = config.attention_bias,
                                         .output_bias = config.attention_bias,
                                         .mlp_bias = config.mlp_bias});
}

}  // namespace

Family LlamaFamily() { return {"llama", "Llama", Parameters}; }

}  // namespace tandem
