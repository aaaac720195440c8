// A loss, a gradient or what they are made of that is not finite: INTERNAL, told apart so that a
// train step can be skipped for it rather than failed.
#ifndef TANDEM_COMMON_BASE_NOT_FINITE_H_
#define TANDEM_COMMON_BASE_NOT_FINITE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

absl::Status NotFiniteError(absl::string_view message);
bool IsNotFinite(const absl::Status& status);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_NOT_FINITE_H_
