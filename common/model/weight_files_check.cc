#include "common/model/weight_files_check.h"

#include <cstddef>
#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/parameter_spec.h"

namespace tandem {
namespace {

// Layers of which the files hold anything. A layer's number is not believed: it may be any.
int64_t NumLayers(const SafetensorsDirectory& files) {
  std::set<absl::string_view> layers;
  for (const TensorView& tensor : files.tensors()) {
    absl::string_view name = tensor.name;
    if (absl::ConsumePrefix(&name, "model.layers.")) layers.insert(name.substr(0, name.find('.')));
  }
  return static_cast<int64_t>(layers.size());
}

}  // namespace

absl::Status CheckSizes(const ModelConfig& config, const SafetensorsDirectory& files) {
  const int64_t layers = NumLayers(files);
  if (config.num_hidden_layers > layers) {
    return InvalidField(
        "config.json.num_hidden_layers",
        absl::StrCat("is ", config.num_hidden_layers, ", the weight files hold ", layers));
  }
  // Every family so far is a dense decoder with these names (decoder_parameters.cc).
  const struct {
    const char* tensor;
    size_t axis;
    int64_t size;
    const char* field;
    const char* what;
  } sizes[] = {
      {kEmbeddingName, 0, config.vocab_size, "vocab_size", ""},
      {kEmbeddingName, 1, config.hidden_size, "hidden_size", ""},
      {"model.layers.0.mlp.gate_proj.weight", 0, config.intermediate_size, "intermediate_size", ""},
      {"model.layers.0.self_attn.q_proj.weight", 0, config.query_size(), "num_attention_heads",
       "times head_dim "},
      {"model.layers.0.self_attn.k_proj.weight", 0, config.key_value_size(), "num_key_value_heads",
       "times head_dim "},
  };
  for (const auto& size : sizes) {
    const TensorView* const tensor = files.Find(size.tensor);
    if (tensor == nullptr || tensor->shape.size() != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat(files.directory(), ": tensor '", size.tensor,
                       "': ", tensor == nullptr ? "missing" : "must have two dimensions"));
    }
    if (tensor->shape[size.axis] != size.size) {
      return InvalidField(absl::StrCat("config.json.", size.field),
                          absl::StrCat(size.what, "is ", size.size, ", the weight files have ",
                                       tensor->shape[size.axis], " ('", size.tensor, "')"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const ModelConfig& config, const std::string& directory) {
  TANDEM_ASSIGN_OR_RETURN(const auto files, SafetensorsDirectory::Open(directory));
  return CheckSizes(config, *files);
}

}  // namespace tandem
