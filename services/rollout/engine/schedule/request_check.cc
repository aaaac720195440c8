#include "services/rollout/engine/schedule/request_check.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::rollout {
namespace {

// The longest sequence that the lanes of a request hold, and the setting of the lane that says so.
struct LengthLimit {
  int64_t tokens;
  const char* setting;
};

LengthLimit LimitOf(bool senior, bool junior, const RequestLimits& limits) {
  const LengthLimit of_senior = {limits.max_model_len, "senior.max_model_len"};
  const LengthLimit of_junior = {limits.junior_max_model_len, "junior.max_model_len"};
  if (!junior) return of_senior;
  return senior && of_senior.tokens <= of_junior.tokens ? of_senior : of_junior;
}

bool RunsJunior(const PromptRequest& request) {
  return request.tandem.enabled || request.speculative.method == SpeculativeMethod::kJunior;
}

LengthLimit LimitOf(const PromptRequest& request, const RequestLimits& limits) {
  return LimitOf(/*senior=*/true, RunsJunior(request) && limits.has_junior, limits);
}

absl::Status CheckSpeculative(const SpeculativeParams& params, const RequestLimits& limits) {
  if (params.method == SpeculativeMethod::kJunior && !limits.has_junior) {
    return WithReason(
        FieldError(absl::StatusCode::kFailedPrecondition, "method", "this server has no junior"),
        reason::kNoJunior);
  }
  if (params.method == SpeculativeMethod::kHeads && limits.speculator_heads == 0) {
    return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "method",
                                 "this server has no speculator"),
                      reason::kNoSpeculator);
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange<int64_t>(
      "num_speculative_tokens", params.num_speculative_tokens, 1, kMaxSpeculativeTokens));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange<int64_t>("prompt_lookup_max", params.prompt_lookup_max, 1, kMaxPromptLookup));
  return CheckInRange<int64_t>("prompt_lookup_min", params.prompt_lookup_min, 1,
                               params.prompt_lookup_max);
}

const VisionConfig* VisionOf(size_t lane, const RequestLimits& limits) {
  return limits.vision[lane].has_value() ? &*limits.vision[lane] : nullptr;
}

absl::Status CheckResponseSoFar(const PromptRequest& request, const RequestLimits& limits) {
  const std::vector<Author>& authors = request.response_authors;
  if (authors.size() != request.response_token_ids.size()) {
    return InvalidField("authorship_mask",
                        absl::StrCat("has ", authors.size(), " entries for ",
                                     request.response_token_ids.size(), " tokens"));
  }
  if (!authors.empty() && !IsDrawn(authors[0])) {
    return InvalidField("authorship_mask[0]",
                        "is of an environment: what it says before a model's first token belongs "
                        "to the prompt");
  }
  return CheckTokenIds("token_ids", request.response_token_ids, limits.num_token_ids);
}

// Checks the number of tokens at each of `places`, which are sent in one message.
absl::Status CheckNumTop(int32_t count, int64_t places, const RequestLimits& limits) {
  const std::string field = "num_top_logprobs";
  TANDEM_RETURN_IF_ERROR(CheckInRange<int64_t>(
      field, count, 0, std::min<int64_t>(kMaxTopLogprobs, limits.num_token_ids)));
  constexpr int64_t kBytes = sizeof(int32_t) + sizeof(float);
  if (count * places * kBytes <= kMaxTopBytes) return absl::OkStatus();
  return FieldError(absl::StatusCode::kOutOfRange, field,
                    absl::StrCat(count, " tokens of ", kBytes, " bytes at each of ", places,
                                 " places; at most in total: ", kMaxTopBytes, " bytes"));
}

absl::Status CheckRouting(const PromptRequest& request, const RequestLimits& limits) {
  const std::string field = "return_routed_experts";
  if (limits.routing_bytes_per_token == 0) {
    return InvalidField(field, "needs a mixture of experts, but the senior has no experts");
  }
  if (limits.senior_has_window) {
    return FieldError(absl::StatusCode::kUnimplemented, field,
                      "is not supported for a senior with sliding windows, which frees the blocks "
                      "that hold the record");
  }
  const int64_t tokens = request.given_tokens() + LongestResponse(request, limits) - 1;
  if (tokens * limits.routing_bytes_per_token <= kMaxRoutingBytes) return absl::OkStatus();
  return FieldError(absl::StatusCode::kOutOfRange, field,
                    absl::StrCat(limits.routing_bytes_per_token, " bytes for each of ", tokens,
                                 " tokens (prompt and sampling.max_tokens); at most in total: ",
                                 kMaxRoutingBytes));
}

// Checks that a request with images can be computed by a junior, and read as the senior reads it.
absl::Status CheckJuniorTakes(absl::Span<const VisionReference> references,
                              const RequestLimits& limits) {
  const VisionConfig *const senior = VisionOf(0, limits), *const junior = VisionOf(1, limits);
  if (references.empty() || senior == nullptr) return absl::OkStatus();
  const auto refused = [](absl::string_view why) {
    return WithReason(
        FieldError(
            absl::StatusCode::kFailedPrecondition, "vision_inputs",
            absl::StrCat(
                why,
                ": images need tandem.enabled false, and neither drafts nor scores of the junior")),
        reason::kNoImages);
  };
  if (junior == nullptr) return refused("the junior takes no images");
  if (TakesSamePixels(*senior, *junior)) return absl::OkStatus();
  return refused(
      "the junior's patches, or the tokens that stand for them, differ from the senior's");
}

absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(const PromptRequest& request,
                                                             const VisionConfig* vision) {
  TANDEM_ASSIGN_OR_RETURN(
      auto images, MakePromptImages(vision, request.prompt_token_ids, request.response_token_ids,
                                    request.vision_inputs, request.blobs));
  if (vision != nullptr) {
    TANDEM_RETURN_IF_ERROR(
        CheckImagesOfTurns(*vision, images.get(), std::ssize(request.prompt_token_ids),
                           "response.token_ids", request.response_token_ids,
                           [&](size_t t) { return IsDrawn(request.response_authors[t]); }));
  }
  return images;
}

// Describes the limit: a model's own may be below the setting.
std::string InWords(const LengthLimit& limit) {
  return absl::StrCat(limit.tokens, " (", limit.setting, ", or the model's own limit)");
}

}  // namespace

absl::StatusOr<LaneImages> ImagesOf(const PromptRequest& request, const RequestLimits& limits) {
  LaneImages images;
  TANDEM_ASSIGN_OR_RETURN(images[0], ImagesOf(request, VisionOf(0, limits)));
  if (!RunsJunior(request) || !limits.has_junior) return images;
  TANDEM_RETURN_IF_ERROR(CheckJuniorTakes(request.vision_inputs, limits));
  TANDEM_ASSIGN_OR_RETURN(images[1], ImagesOf(request, VisionOf(1, limits)));
  return images;
}

absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(const ScoreSequence& sequence,
                                                             const Blobs& blobs, size_t lane,
                                                             const RequestLimits& limits) {
  // A response may have written such a token, as text.
  const auto tokens = absl::MakeConstSpan(sequence.token_ids);
  const auto prompt = static_cast<size_t>(sequence.first_scored_token);
  if (lane == 1) TANDEM_RETURN_IF_ERROR(CheckJuniorTakes(sequence.vision_inputs, limits));
  return MakePromptImages(VisionOf(lane, limits), tokens.first(prompt), tokens.subspan(prompt),
                          sequence.vision_inputs, blobs);
}

int32_t LongestResponse(const PromptRequest& request, const RequestLimits& limits) {
  const int64_t room = LimitOf(request, limits).tokens - request.given_tokens();
  return static_cast<int32_t>(std::min<int64_t>(request.sampling.max_tokens, room));
}

absl::Status CheckPrompt(const PromptRequest& request, const RequestLimits& limits) {
  const auto length = static_cast<int64_t>(request.prompt_token_ids.size());
  if (length == 0) return InvalidField("prompt_token_ids", "must not be empty");
  if (const LengthLimit limit = LimitOf(request, limits); length >= limit.tokens) {
    return FieldError(
        absl::StatusCode::kOutOfRange, "prompt_token_ids",
        absl::StrCat(length,
                     " tokens leave no room for a response: prompt and response may have at most ",
                     InWords(limit)));
  }
  TANDEM_RETURN_IF_ERROR(
      CheckTokenIds("prompt_token_ids", request.prompt_token_ids, limits.num_token_ids));
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("response", CheckResponseSoFar(request, limits)));
  if (const LengthLimit limit = LimitOf(request, limits); request.given_tokens() >= limit.tokens) {
    return FieldError(
        absl::StatusCode::kOutOfRange, "response.token_ids",
        absl::StrCat(request.response_token_ids.size(), " tokens behind a prompt of ", length,
                     " leave no room for more: together at most ", InWords(limit)));
  }
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("sampling", tandem::Validate(request.sampling, limits.num_token_ids)));
  if (!request.sampling.stop.empty() && !limits.has_vocabulary) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "sampling.stop",
                      "this server cannot search for texts: senior.model has no tokenizer.json");
  }
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("tandem", tandem::Validate(request.tandem, limits.num_token_ids)));
  if (request.tandem.enabled && !limits.has_junior) {
    return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "tandem.enabled",
                                 "this server has no junior"),
                      reason::kNoJunior);
  }
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("speculative", CheckSpeculative(request.speculative, limits)));
  TANDEM_RETURN_IF_ERROR(
      CheckNumTop(request.num_top_logprobs, LongestResponse(request, limits), limits));
  if (request.return_routed_experts) TANDEM_RETURN_IF_ERROR(CheckRouting(request, limits));
  TANDEM_RETURN_IF_ERROR(ImagesOf(request, limits).status());
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("num_samples", request.num_samples, 1));
  if (request.num_samples > limits.max_samples) {
    return FieldError(absl::StatusCode::kOutOfRange, "num_samples",
                      absl::StrCat(request.num_samples, " samples, at most ", limits.max_samples,
                                   " fit the queue"));
  }
  if (request.first_sample_index >
      std::numeric_limits<uint64_t>::max() - static_cast<uint64_t>(request.num_samples)) {
    return FieldError(absl::StatusCode::kOutOfRange, "first_sample_index",
                      "leaves no indices for the samples");
  }
  return absl::OkStatus();
}

absl::Status CheckScore(const ScoreRequest& request, const RequestLimits& limits) {
  if (!request.senior && !request.junior) {
    return InvalidField("senior", "neither senior nor junior is requested");
  }
  if (request.sequences.empty()) return InvalidField("sequences", "must not be empty");
  if (request.junior && !limits.has_junior) {
    return WithReason(
        FieldError(absl::StatusCode::kFailedPrecondition, "junior", "this server has no junior"),
        reason::kNoJunior);
  }
  TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", request.temperature, 0.0));
  TANDEM_RETURN_IF_ERROR(tandem::Validate(
      SamplingParams{.temperature = request.temperature, .max_tokens = 1}, limits.num_token_ids));
  const LengthLimit limit = LimitOf(request.senior, request.junior, limits);
  int64_t places = 0;
  for (size_t i = 0; i < request.sequences.size(); ++i) {
    const ScoreSequence& sequence = request.sequences[i];
    const std::string path = absl::StrCat("sequences[", i, "]");
    const auto length = static_cast<int64_t>(sequence.token_ids.size());
    if (length < 2) return InvalidField(path + ".token_ids", "needs at least two tokens");
    if (length > limit.tokens) {
      return FieldError(absl::StatusCode::kOutOfRange, path + ".token_ids",
                        absl::StrCat(length, " tokens, at most ", InWords(limit)));
    }
    TANDEM_RETURN_IF_ERROR(
        CheckTokenIds(path + ".token_ids", sequence.token_ids, limits.num_token_ids));
    TANDEM_RETURN_IF_ERROR(CheckInRange<int64_t>(path + ".first_scored_token",
                                                 sequence.first_scored_token, 1, length - 1));
    places += length - sequence.first_scored_token;
    for (const size_t lane : {0, 1}) {
      if (!(lane == 0 ? request.senior : request.junior)) continue;
      TANDEM_RETURN_IF_ERROR(
          PrependFieldPath(path, ImagesOf(sequence, request.blobs, lane, limits).status()));
    }
  }
  const int models = (request.senior ? 1 : 0) + (request.junior ? 1 : 0);
  return CheckNumTop(request.num_top_logprobs, models * places, limits);
}

}  // namespace tandem::rollout
