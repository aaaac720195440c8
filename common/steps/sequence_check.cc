#include "common/steps/sequence_check.h"

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::training {
namespace {

constexpr float kRounding = 1e-3f;

absl::Status CheckTokens(absl::string_view field, absl::Span<const int32_t> ids,
                         int64_t num_token_ids) {
  if (ids.empty()) return InvalidField(field, "must hold at least one token");
  return CheckTokenIds(field, ids, num_token_ids);
}

}  // namespace

absl::Status CheckSequence(absl::Span<const int32_t> prompt, absl::Span<const int32_t> response,
                           const SequenceLimits& limits) {
  const auto length = static_cast<int64_t>(prompt.size() + response.size());
  if (length > limits.max_model_len) {
    return FieldError(absl::StatusCode::kOutOfRange, "response_token_ids",
                      absl::StrCat("prompt and response have ", length, " tokens, at most ",
                                   limits.max_model_len, " are allowed"));
  }
  TANDEM_RETURN_IF_ERROR(CheckTokens("prompt_token_ids", prompt, limits.num_token_ids));
  return CheckTokens("response_token_ids", response, limits.num_token_ids);
}

absl::Status CheckPerToken(absl::string_view field, absl::Span<const float> numbers,
                           size_t length) {
  if (numbers.size() != length) {
    return InvalidField(
        field, absl::StrCat("has ", numbers.size(), " entries for ", length, " response tokens"));
  }
  return CheckFinite(field, numbers);
}

absl::Status CheckLogProbs(absl::string_view field, absl::Span<const float> numbers,
                           size_t length) {
  TANDEM_RETURN_IF_ERROR(CheckPerToken(field, numbers, length));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] > kRounding) {
      return InvalidField(
          absl::StrCat(field, "[", i, "]"),
          absl::StrCat("is ", numbers[i], ", which is not the logarithm of a probability"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::training
