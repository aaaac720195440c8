// Llama (and SmolLM2): attention_bias covers the output projection too.
#include <memory>

#include "common/model/decoder.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

absl::StatusOr<std::unique_ptr<Backbone>> Build(const ModelConfig& config, ParameterStore& store) {
  const DecoderOptions options = {.qkv_bias = config.attention_bias,
                                  .output_bias = config.attention_bias,
                                  .mlp_bias = config.mlp_bias};
  return std::make_unique<DenseDecoder>(config, options, store);
}

}  // namespace

Family LlamaFamily() { return {"llama", "Llama", Build}; }

}  // namespace tandem
