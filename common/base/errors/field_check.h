// Checks of one field of a request or a configuration. Each returns OK or INVALID_ARGUMENT with the
// field's path (`path` or "path[i]") and what was given. NaN and infinities pass none of them.
#ifndef TANDEM_COMMON_BASE_ERRORS_FIELD_CHECK_H_
#define TANDEM_COMMON_BASE_ERRORS_FIELD_CHECK_H_

#include <cmath>
#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"

namespace tandem {

template <typename T>
concept Number = std::integral<T> || std::floating_point<T>;

// The bounds take the value's type: CheckInRange("top_p", top_p, 0, 1).

// value in [low, high].
template <Number T>
absl::Status CheckInRange(absl::string_view path, T value, std::type_identity_t<T> low,
                          std::type_identity_t<T> high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(path, absl::StrCat("must be in [", low, ", ", high, "], got ", value));
}

// value in [low, high).
template <Number T>
absl::Status CheckBelow(absl::string_view path, T value, std::type_identity_t<T> low,
                        std::type_identity_t<T> high) {
  if (value >= low && value < high) return absl::OkStatus();
  return InvalidField(path, absl::StrCat("must be in [", low, ", ", high, "), got ", value));
}

// value >= low.
template <Number T>
absl::Status CheckAtLeast(absl::string_view path, T value, std::type_identity_t<T> low) {
  if (std::isfinite(static_cast<double>(value)) && value >= low) return absl::OkStatus();
  return InvalidField(path, absl::StrCat("must be at least ", low, ", got ", value));
}

// value > low.
template <Number T>
absl::Status CheckAbove(absl::string_view path, T value, std::type_identity_t<T> low) {
  if (std::isfinite(static_cast<double>(value)) && value > low) return absl::OkStatus();
  return InvalidField(path, absl::StrCat("must be above ", low, ", got ", value));
}

absl::Status CheckFinite(absl::string_view path, double value);
// Every entry; names the first that is not.
absl::Status CheckFinite(absl::string_view path, std::span<const float> values);

// Every id is in [0, num_token_ids).
absl::Status CheckTokenIds(absl::string_view path, std::span<const int32_t> ids,
                           int64_t num_token_ids);

// Text that is not empty.
absl::Status CheckGiven(absl::string_view path, absl::string_view text);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_FIELD_CHECK_H_
