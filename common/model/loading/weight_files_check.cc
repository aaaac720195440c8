#include "common/model/loading/weight_files_check.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/family.h"

namespace tandem {
namespace {

// Counts the layers that the files hold tensors of. Layer numbers in names are not trusted: a
// number may be anything.
int64_t NumLayers(const Family& family, const SafetensorsDirectory& files) {
  std::set<std::string> layers;
  for (const TensorView& tensor : files.tensors()) {
    const std::string parameter = family.ParameterName(tensor.name);
    absl::string_view name = parameter;
    if (absl::ConsumePrefix(&name, "model.layers.")) {
      layers.emplace(name.substr(0, name.find('.')));
    }
  }
  return static_cast<int64_t>(layers.size());
}

const TensorView* FindParameter(const Family& family, const SafetensorsDirectory& files,
                                const std::string& name) {
  for (const TensorView& tensor : files.tensors()) {
    if (family.ParameterName(tensor.name) == name) return &tensor;
  }
  return nullptr;
}

// A size, and the tensor that it is compared with; nullptr if the files have none.
struct FoundSize {
  const WeightFileSize& size;
  const TensorView* tensor;
};

FoundSize Find(const Family& family, const SafetensorsDirectory& files,
               const WeightFileSize& declared) {
  if (const TensorView* const tensor = FindParameter(family, files, declared.tensor);
      tensor != nullptr) {
    return {declared, tensor};
  }
  for (const WeightFileSize& other : declared.instead) {
    const TensorView* const tensor = FindParameter(family, files, other.tensor);
    if (tensor != nullptr) return {other, tensor};
  }
  return {declared, nullptr};
}

// Refuses files whose names begin with something that `transformers` does not know: those of a
// compiled or wrapped model, or of another architecture.
absl::Status CheckNames(const Family& family, const SafetensorsDirectory& files) {
  if (FindParameter(family, files, kEmbeddingName) != nullptr) return absl::OkStatus();
  for (const TensorView& tensor : files.tensors()) {
    absl::string_view prefix = tensor.name;
    if (!absl::ConsumeSuffix(&prefix, kEmbeddingName)) {
      if (!absl::ConsumeSuffix(&prefix, "embed_tokens.weight")) continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(files.directory(), ": tensor '", tensor.name, "': expected '", kEmbeddingName,
                     "': names that begin with '", prefix, "' are not those of a model of type ",
                     family.model_type(), "; save it again without that prefix"));
  }
  if (files.tensors().empty() || NumLayers(family, files) > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      files.directory(), ": tensor '", files.tensors().front().name, "': expected '",
      kEmbeddingName, "' and names that begin with 'model.layers.', as a model of type ",
      family.model_type(), " has them"));
}

}  // namespace

absl::Status CheckSizes(const ModelConfig& config, const SafetensorsDirectory& files) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_RETURN_IF_ERROR(CheckNames(*family, files));
  const int64_t layers = NumLayers(*family, files);
  if (config.num_hidden_layers > layers) {
    return InvalidField(
        absl::StrCat("config.json.", config.text_path, "num_hidden_layers"),
        absl::StrCat("is ", config.num_hidden_layers, ", the weight files hold ", layers));
  }
  for (const WeightFileSize& declared : family->WeightFileSizes(config)) {
    const auto& [size, tensor] = Find(*family, files, declared);
    if (tensor == nullptr || tensor->shape.size() != size.dimensions) {
      return absl::InvalidArgumentError(absl::StrCat(
          files.directory(), ": tensor '", size.tensor, "': ",
          tensor == nullptr ? "missing"
                            : absl::StrCat("must have ", size.dimensions, " dimensions")));
    }
    if (tensor->shape[size.axis] != size.size) {
      return InvalidField(absl::StrCat("config.json.", size.field),
                          absl::StrCat(size.factor, "is ", size.size, ", the weight files have ",
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
