// The error of a loss, gradient or input of them that is not finite: INTERNAL, marked so that a
// train step is skipped rather than failed.
#ifndef TANDEM_COMMON_BASE_ERRORS_NOT_FINITE_H_
#define TANDEM_COMMON_BASE_ERRORS_NOT_FINITE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

absl::Status NotFiniteError(absl::string_view message);
bool IsNotFinite(const absl::Status& status);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_NOT_FINITE_H_
