// Fuzz target: config.json of a model.
#include "common/model/config/model_config.h"

#include "absl/strings/string_view.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tandem::fuzz::Require;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = tandem::ParseModelConfig(text);
  if (!config.ok()) {
    tandem::fuzz::RequireRefusal(config.status());
    return 0;
  }
  Require(!config->model_type.empty(), "a model has a type");
  Require(config->vocab_size > 0 && config->hidden_size > 0 && config->num_hidden_layers > 0,
          "sizes are positive");
  Require(config->num_attention_heads % config->num_key_value_heads == 0,
          "heads are shared evenly");
  Require(config->query_size() > 0 && config->key_value_size() > 0, "no product overflows");
  for (const int64_t id : config->eos_token_ids) Require(id >= 0, "a token id is not negative");
  return 0;
}
