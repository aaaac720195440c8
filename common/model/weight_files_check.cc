#include "common/model/weight_files_check.h"

#include <cstddef>
#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/family.h"

namespace tandem {
namespace {

// Counts the layers that the files hold tensors of. Layer numbers in names are not trusted: a
// number may be anything.
int64_t NumLayers(const SafetensorsDirectory& files) {
  std::set<absl::string_view> layers;
  for (const TensorView& tensor : files.tensors()) {
    absl::string_view name = tensor.name;
    if (absl::ConsumePrefix(&name, "model.layers.")) layers.insert(name.substr(0, name.find('.')));
  }
  return static_cast<int64_t>(layers.size());
}

// A size, and the tensor that it is compared with; nullptr if the files have none.
struct FoundSize {
  const WeightFileSize& size;
  const TensorView* tensor;
};

FoundSize Find(const SafetensorsDirectory& files, const WeightFileSize& declared) {
  if (const TensorView* const tensor = files.Find(declared.tensor); tensor != nullptr) {
    return {declared, tensor};
  }
  for (const WeightFileSize& other : declared.instead) {
    const TensorView* const tensor = files.Find(other.tensor);
    if (tensor != nullptr) return {other, tensor};
  }
  return {declared, nullptr};
}

}  // namespace

absl::Status CheckSizes(const ModelConfig& config, const SafetensorsDirectory& files) {
  const int64_t layers = NumLayers(files);
  if (config.num_hidden_layers > layers) {
    return InvalidField(
        "config.json.num_hidden_layers",
        absl::StrCat("is ", config.num_hidden_layers, ", the weight files hold ", layers));
  }
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  for (const WeightFileSize& declared : family->WeightFileSizes(config)) {
    const auto& [size, tensor] = Find(files, declared);
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
