// Checks of the TrainStep header, which trainer and critic share.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_STEP_HEADER_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_STEP_HEADER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/steps/training_state.h"

namespace tandem::training {

// Checks a step before its samples are sent. INVALID_ARGUMENT with the field; OUT_OF_RANGE for more
// than `max_samples` samples.
template <typename Header>
absl::Status CheckStepHeader(const Header& header, int64_t max_samples) {
  TANDEM_RETURN_IF_ERROR(CheckStepNames(header.run_id(), header.request_id()));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("step", header.step(), 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("num_samples", header.num_samples(), 1));
  if (header.num_samples() <= max_samples) return absl::OkStatus();
  return FieldError(
      absl::StatusCode::kOutOfRange, "num_samples",
      absl::StrCat(header.num_samples(), " samples, at most ", max_samples, " are accepted"));
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_STEP_HEADER_H_
