#include "common/base/errors/field_check.h"

namespace tandem {

absl::Status CheckFinite(absl::string_view path, double value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return InvalidField(path, absl::StrCat("must be finite, got ", value));
}

absl::Status CheckFinite(absl::string_view path, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) return CheckFinite(absl::StrCat(path, "[", i, "]"), values[i]);
  }
  return absl::OkStatus();
}

absl::Status CheckTokenIds(absl::string_view path, std::span<const int32_t> ids,
                           int64_t num_token_ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= num_token_ids) {
      return InvalidField(absl::StrCat(path, "[", i, "]"),
                          absl::StrCat("token id ", ids[i], " is outside the vocabulary of ",
                                       num_token_ids, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGiven(absl::string_view path, absl::string_view text) {
  return text.empty() ? InvalidField(path, "is required") : absl::OkStatus();
}

}  // namespace tandem
