// JSON from files that nobody vouches for: size and depth are bounded before anything is built.
#ifndef TANDEM_COMMON_TENSOR_BOUNDED_JSON_H_
#define TANDEM_COMMON_TENSOR_BOUNDED_JSON_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tandem {

// INVALID_ARGUMENT "<name>: ..." for text that is not JSON, nests deeper than `max_depth`, or holds
// the same key twice in one object.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, absl::string_view name,
                                                int max_depth = 32);

// The whole file; NOT_FOUND if it is not there, INVALID_ARGUMENT if it is longer than `max_bytes`.
absl::StatusOr<std::string> ReadBoundedFile(const std::string& path, size_t max_bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_BOUNDED_JSON_H_
