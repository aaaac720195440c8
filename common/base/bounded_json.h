// JSON from untrusted files: its depth is bounded before anything is built. The reader of the file
// bounds its size.
#ifndef TANDEM_COMMON_BASE_BOUNDED_JSON_H_
#define TANDEM_COMMON_BASE_BOUNDED_JSON_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tandem {

inline constexpr int kMaxJsonDepth = 32;

// Parses `text`. INVALID_ARGUMENT "<name>: ..." for text that is not JSON, nests deeper than
// kMaxJsonDepth, or holds the same key twice in one object.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, absl::string_view name);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_BOUNDED_JSON_H_
