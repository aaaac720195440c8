#include "common/tandem/tandem_config.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

// Below this the scaled logits leave the range in which float32 tells them apart.
constexpr double kMinTemperature = 1e-3;
constexpr double kMaxTemperature = 100.0;

}  // namespace

absl::Status Validate(const TandemConfig& config, int64_t vocab_size) {
  const bool chunk = config.enabled && config.selection_strategy == SelectionStrategy::kChunk;
  const bool word = config.enabled && config.selection_strategy == SelectionStrategy::kWord;
  TANDEM_RETURN_IF_ERROR(CheckInRange("prob_senior", config.prob_senior, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("chunk_size", config.chunk_size, chunk ? 1 : 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_gap_tokens", config.max_gap_tokens, word ? 1 : 0));
  return CheckTokenIds("boundary_token_ids", config.boundary_token_ids, vocab_size);
}

absl::Status Validate(const SamplingParams& params, int64_t vocab_size) {
  if (!(params.temperature == 0.0 ||
        (params.temperature >= kMinTemperature && params.temperature <= kMaxTemperature))) {
    return InvalidField("temperature",
                        absl::StrCat("must be 0 (greedy) or in [", kMinTemperature, ", ",
                                     kMaxTemperature, "], got ", params.temperature));
  }
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("top_k", params.top_k, 0));
  TANDEM_RETURN_IF_ERROR(CheckAbove("top_p", params.top_p, 0));
  TANDEM_RETURN_IF_ERROR(CheckInRange("top_p", params.top_p, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("min_p", params.min_p, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_tokens", params.max_tokens, 1));
  return CheckTokenIds("stop_token_ids", params.stop_token_ids, vocab_size);
}

}  // namespace tandem
