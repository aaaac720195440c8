#include "common/model/loading/parameter_intake.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

absl::Status Refuse(absl::string_view name, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "': ", why));
}

}  // namespace

ParameterIntake::ParameterIntake(const std::vector<Parameter>& parameters, bool tied)
    : parameters_(parameters), tied_(tied) {
  for (const Parameter& parameter : parameters) by_name_.emplace(parameter.spec.name, &parameter);
}

absl::StatusOr<const Parameter*> ParameterIntake::Accept(const std::string& name,
                                                         const at::Tensor& tensor) {
  const bool is_tied_head = tied_ && name == kLmHeadName;
  const auto found = by_name_.find(is_tied_head ? kEmbeddingName : name);
  if (found == by_name_.end() || !seen_.insert(name).second) {
    return Refuse(name, "appears twice or is not a parameter");
  }
  const Parameter* const parameter = found->second;
  const std::vector<int64_t>& shape = parameter->spec.shape;
  if (!tensor.defined() || tensor.sizes() != at::IntArrayRef(shape)) {
    return Refuse(name, absl::StrCat("shape [", absl::StrJoin(tensor.sizes(), ", "),
                                     "], expected [", absl::StrJoin(shape, ", "), "]"));
  }
  if (!tensor.is_floating_point()) return Refuse(name, "is not floating-point");
  if (is_tied_head || (tied_ && name == kEmbeddingName)) {
    (is_tied_head ? tied_head_ : embedding_) = WeightsDigest({{kEmbeddingName, tensor}});
  }
  return is_tied_head ? nullptr : parameter;
}

absl::Status ParameterIntake::CheckComplete() const {
  for (const Parameter& parameter : parameters_) {
    if (!seen_.contains(parameter.spec.name)) return Refuse(parameter.spec.name, "is missing");
  }
  if (!tied_head_.empty() && tied_head_ != embedding_) {
    return Refuse(kLmHeadName, "differs from the embedding, which is this model's output layer");
  }
  return absl::OkStatus();
}

}  // namespace tandem
