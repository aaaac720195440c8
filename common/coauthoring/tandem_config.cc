#include "common/coauthoring/tandem_config.h"

#include <set>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

// Below this the scaled logits leave the range in which float32 tells them apart.
constexpr double kMinTemperature = 1e-3;
constexpr double kMaxTemperature = 100.0;

absl::Status CheckIdSet(absl::string_view path, std::span<const int32_t> ids, size_t max_size,
                        int64_t num_token_ids) {
  if (ids.size() > max_size) {
    return InvalidField(path,
                        absl::StrCat("may have at most ", max_size, " ids, has ", ids.size()));
  }
  TANDEM_RETURN_IF_ERROR(CheckTokenIds(path, ids, num_token_ids));
  std::set<int32_t> seen;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!seen.insert(ids[i]).second) {
      return InvalidField(absl::StrCat(path, "[", i, "]"),
                          absl::StrCat("token id ", ids[i], " is listed twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const TandemConfig& config, int64_t num_token_ids) {
  const bool chunk = config.enabled && config.selection_strategy == SelectionStrategy::kChunk;
  const bool word = config.enabled && config.selection_strategy == SelectionStrategy::kWord;
  TANDEM_RETURN_IF_ERROR(CheckInRange("prob_senior", config.prob_senior, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("chunk_size", config.chunk_size, chunk ? 1 : 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_gap_tokens", config.max_gap_tokens, word ? 1 : 0));
  return CheckIdSet("boundary_token_ids", config.boundary_token_ids, kMaxBoundaryTokenIds,
                    num_token_ids);
}

absl::Status Validate(const SamplingParams& params, int64_t num_token_ids) {
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
  TANDEM_RETURN_IF_ERROR(
      CheckIdSet("stop_token_ids", params.stop_token_ids, kMaxStopTokenIds, num_token_ids));
  if (params.stop.size() > kMaxStopTexts) {
    return InvalidField("stop", absl::StrCat("may have at most ", kMaxStopTexts, " texts, has ",
                                             params.stop.size()));
  }
  for (size_t i = 0; i < params.stop.size(); ++i) {
    const size_t bytes = params.stop[i].size();
    if (bytes == 0 || bytes > kMaxStopTextBytes) {
      return InvalidField(
          absl::StrCat("stop[", i, "]"),
          absl::StrCat("must have 1 to ", kMaxStopTextBytes, " bytes, has ", bytes));
    }
  }
  return absl::OkStatus();
}

bool CutsByCount(const SamplingParams& params, int64_t num_token_ids) {
  return params.top_k > 0 && params.top_k < num_token_ids;
}

bool Cuts(const SamplingParams& params, int64_t num_token_ids) {
  return CutsByCount(params, num_token_ids) || params.top_p < 1.0 || params.min_p > 0.0;
}

}  // namespace tandem
