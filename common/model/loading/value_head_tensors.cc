#include "common/model/loading/value_head_tensors.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

constexpr const char* kStems[] = {"score.", "v_head.summary.", "output_layer.value_head.",
                                  "output_layer."};

}  // namespace

bool IsValueHeadName(absl::string_view name) {
  for (const absl::string_view stem : kStems) {
    if (name == absl::StrCat(stem, "weight") || name == absl::StrCat(stem, "bias")) return true;
  }
  return false;
}

namespace {

// Whether the tensor belongs to a head that is no single linear map: score.0.weight,
// score.2.weight.
bool IsOtherHead(absl::string_view name) {
  for (const absl::string_view stem : {"score.", "v_head.", "value_head.", "classifier."}) {
    if (absl::StartsWith(name, stem) && !IsValueHeadName(name)) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<ValueHeadTensors> FindValueHead(const std::vector<const TensorView*>& tensors) {
  ValueHeadTensors head;
  for (const TensorView* tensor : tensors) {
    if (IsOtherHead(tensor->name)) {
      return absl::UnimplementedError(
          absl::StrCat(tensor->file, ": tensor '", tensor->name,
                       "': a value head of several layers is not supported: a critic has a single "
                       "linear map, such as score.weight"));
    }
    if (!IsValueHeadName(tensor->name)) continue;
    const TensorView*& place = absl::EndsWith(tensor->name, "weight") ? head.weight : head.bias;
    if (place != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(tensor->file, ": tensor '", tensor->name,
                                                     "': a second value head besides '",
                                                     place->name, "'"));
    }
    place = tensor;
  }
  if (head.bias != nullptr && head.weight == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(head.bias->file, ": tensor '", head.bias->name,
                                                   "': a value head's bias without its weight"));
  }
  return head;
}

}  // namespace tandem
