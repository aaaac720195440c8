#include "common/weights/copied_tensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

absl::Status CheckTensor(const std::vector<WeightSpec>& expected, size_t index,
                         const std::string& name, const at::Tensor& tensor) {
  if (index == expected.size() || name != expected[index].name ||
      tensor.sizes() != at::IntArrayRef(expected[index].shape)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is not the expected one"));
  }
  if (tensor.is_floating_point()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is not floating-point"));
}

}  // namespace

absl::Status VisitTensors(
    const std::vector<WeightSpec>& tensors, TensorSource source,
    absl::FunctionRef<absl::Status(size_t first, size_t last, const at::Tensor& tensor)> add) {
  size_t next = 0;
  TANDEM_RETURN_IF_ERROR(
      source([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
        const size_t first = next;
        TANDEM_RETURN_IF_ERROR(CheckTensor(tensors, first, name, tensor));
        while (next < tensors.size() && tensors[next].name == name) ++next;
        return add(first, next, tensor);
      }));
  if (next == tensors.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor '", tensors[next].name, "' was not given"));
}

absl::Status CheckCopiedModel(const WeightManifest& manifest, const std::string& copied) {
  if (std::ranges::all_of(manifest.tensors, &IsFloat32) || !manifest.adapter.empty() ||
      copied == manifest.digest) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("the copy of version ", manifest.version, " has digest ",
                                          copied, ", the weights have ", manifest.digest));
}

}  // namespace tandem
