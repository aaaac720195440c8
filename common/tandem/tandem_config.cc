#include "common/tandem/tandem_config.h"

#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

// Below this the scaled logits leave the range in which float32 tells them apart.
constexpr double kMinTemperature = 1e-3;
constexpr double kMaxTemperature = 100.0;

constexpr std::array<std::pair<SelectionStrategy, absl::string_view>, 5> kNames = {{
    {SelectionStrategy::kBernoulli, "bernoulli"},
    {SelectionStrategy::kChunk, "chunk"},
    {SelectionStrategy::kAlternating, "alternating"},
    {SelectionStrategy::kSentence, "sentence"},
    {SelectionStrategy::kWord, "word"},
}};

absl::Status CheckIds(absl::string_view field, const std::vector<int32_t>& ids,
                      int64_t vocab_size) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      return InvalidField(absl::StrCat(field, "[", i, "]"),
                          absl::StrCat("token id ", ids[i], " is outside the vocabulary of ",
                                       vocab_size, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCount(absl::string_view field, int32_t value, bool required) {
  if (value < 0 || (required && value == 0)) {
    return InvalidField(field, absl::StrCat("must be at least 1, got ", value));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view SelectionStrategyName(SelectionStrategy strategy) {
  for (const auto& [value, name] : kNames) {
    if (value == strategy) return name;
  }
  return "unknown";
}

absl::Status Validate(const TandemConfig& config, int64_t vocab_size) {
  if (SelectionStrategyName(config.selection_strategy) == "unknown") {
    return InvalidField("selection_strategy", "unknown strategy");
  }
  // Written so that NaN fails too.
  if (!(config.prob_senior >= 0.0 && config.prob_senior <= 1.0)) {
    return InvalidField("prob_senior", absl::StrCat("must be in [0, 1], got ", config.prob_senior));
  }
  TANDEM_RETURN_IF_ERROR(
      CheckCount("chunk_size", config.chunk_size,
                 config.enabled && config.selection_strategy == SelectionStrategy::kChunk));
  TANDEM_RETURN_IF_ERROR(
      CheckCount("max_gap_tokens", config.max_gap_tokens,
                 config.enabled && config.selection_strategy == SelectionStrategy::kWord));
  return CheckIds("boundary_token_ids", config.boundary_token_ids, vocab_size);
}

absl::Status Validate(const SamplingParams& params, int64_t vocab_size) {
  if (!(params.temperature == 0.0 ||
        (params.temperature >= kMinTemperature && params.temperature <= kMaxTemperature))) {
    return InvalidField("temperature",
                        absl::StrCat("must be 0 (greedy) or in [", kMinTemperature, ", ",
                                     kMaxTemperature, "], got ", params.temperature));
  }
  if (params.top_k < 0) {
    return InvalidField("top_k", absl::StrCat("must be at least 0, got ", params.top_k));
  }
  if (!(params.top_p > 0.0 && params.top_p <= 1.0)) {
    return InvalidField("top_p", absl::StrCat("must be in (0, 1], got ", params.top_p));
  }
  if (!(params.min_p >= 0.0 && params.min_p <= 1.0)) {
    return InvalidField("min_p", absl::StrCat("must be in [0, 1], got ", params.min_p));
  }
  TANDEM_RETURN_IF_ERROR(CheckCount("max_tokens", params.max_tokens, /*required=*/true));
  return CheckIds("stop_token_ids", params.stop_token_ids, vocab_size);
}

}  // namespace tandem
