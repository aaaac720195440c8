// For tests: a model whose vocabulary is padded, as Qwen2.5's larger models are.
#ifndef TANDEM_COMMON_MODEL_TESTING_PADDED_MODEL_H_
#define TANDEM_COMMON_MODEL_TESTING_PADDED_MODEL_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "common/model/model.h"

namespace tandem {

// Writes the model in `source` with `rows` rows of the vocabulary, and its tokenizer.json if there
// is one. Padding rows have large weights, so that a computation that does not leave them out comes
// to other results. Aborts on an error.
inline void WritePaddedModel(const std::string& source, const std::string& directory,
                             int64_t rows) {
  namespace fs = std::filesystem;
  const std::unique_ptr<Model> model = Model::Load(source).value();
  nlohmann::json config = nlohmann::json::parse(model->config().raw_json);
  config["vocab_size"] = rows;
  const auto padded = Model::Random(ParseModelConfig(config.dump()).value(), /*seed=*/1).value();
  NamedTensors parameters;
  for (const auto& [name, values] : model->Parameters()) {
    const bool has_padding = name == kEmbeddingName || name == kLmHeadName;
    const at::Tensor padding = at::full({rows - values.size(0), values.size(-1)}, 5.0f);
    parameters.emplace_back(name, has_padding ? at::cat({values, padding}) : values);
  }
  if (!padded->LoadParameters(parameters).ok() || !padded->Save(directory).ok()) std::abort();
  const fs::path tokenizer = fs::path(source) / "tokenizer.json";
  if (fs::exists(tokenizer)) fs::copy(tokenizer, fs::path(directory) / "tokenizer.json");
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_PADDED_MODEL_H_
