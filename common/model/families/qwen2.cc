// Qwen2 and Qwen2.5: queries, keys and values always have a bias, nothing else does.
#include <memory>

#include "common/model/decoder.h"
#include "common/model/families/families.h"

namespace tandem {
namespace {

absl::StatusOr<std::unique_ptr<Backbone>> Build(const ModelConfig& config, ParameterStore& store) {
  const DecoderOptions options = {.qkv_bias = true};
  return std::make_unique<DenseDecoder>(config, options, store);
}

}  // namespace

Family Qwen2Family() { return {"qwen2", "Qwen2", Build}; }

}  // namespace tandem
