// The values of parameters that a model holds packed, from the files that it was loaded from.
#ifndef TANDEM_COMMON_PARALLEL_SOURCE_VALUES_H_
#define TANDEM_COMMON_PARALLEL_SOURCE_VALUES_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "absl/status/statusor.h"
#include "common/model/model.h"

namespace tandem::parallel {

// Opens the files at the first call. `model` must outlive the object.
class SourceValues {
 public:
  explicit SourceValues(const Model& model) : model_(model) {}

  // Returns the whole parameter of Model::DeclaredParameters, in the type of its file, valid as
  // long as the object. FAILED_PRECONDITION if the files are not those that the model was loaded
  // from.
  absl::StatusOr<at::Tensor> Of(const Parameter& parameter);

 private:
  const Model& model_;
  std::optional<SourceParameters> source_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_SOURCE_VALUES_H_
