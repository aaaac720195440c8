#include "common/model/parameters/prepared_weights.h"

#include "common/base/errors/status_macros.h"

namespace tandem {

absl::Status PreparedWeights::Add(const std::string& name, const at::Tensor& whole) {
  TANDEM_ASSIGN_OR_RETURN(const Parameter* parameter, intake_.Accept(name, whole));
  if (parameter != nullptr && parameter->held()) {  // else it is another process's
    parameter->CopyFrom(whole, ops::PackThreads::kOne);
  }
  return absl::OkStatus();
}

}  // namespace tandem
