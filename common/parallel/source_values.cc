#include "common/parallel/source_values.h"

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "common/base/errors/status_macros.h"

namespace tandem::parallel {

absl::StatusOr<at::Tensor> SourceValues::Of(const Parameter& parameter) {
  if (!source_.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(SourceParameters source, model_.ReadSource());
    if (source.Mark() != model_.source_mark()) {
      return absl::FailedPreconditionError(
          "the files of the model have changed since the server started, and its packed weights "
          "are "
          "those of the former ones");
    }
    source_ = std::move(source);
  }
  const auto index = static_cast<size_t>(&parameter - model_.DeclaredParameters().data());
  return source_->tensors[index].second;
}

}  // namespace tandem::parallel
