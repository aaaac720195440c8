// Checks of requests. Errors have the field's path.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_REQUEST_CHECK_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_REQUEST_CHECK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/vision/prompt_images.h"
#include "common/model/vision/vision_config.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct RequestLimits {
  int64_t num_token_ids = 0;
  int64_t max_model_len = 0;         // of the senior
  int64_t junior_max_model_len = 0;  // of the junior, if there is one
  int64_t max_samples = 0;           // of one prompt
  bool has_junior = false;
  int64_t speculator_heads = 0;  // of the senior's speculator; 0: there is none
  // Size of a record of the senior's routing in a message, by token; 0: it has no experts.
  int64_t routing_bytes_per_token = 0;
  // Whether a layer of the senior reads a window of its keys alone.
  bool senior_has_window = false;
  // Whether the senior has a tokenizer.json, by which stop texts are found.
  bool has_vocabulary = false;
  // The vision towers of the lanes, senior first; nullopt for a model that takes no images.
  std::array<std::optional<VisionConfig>, 2> vision = {};
};

// Most bytes of a record of routing, which travels in one message with its response: less than the
// 64 MiB that clients take.
inline constexpr int64_t kMaxRoutingBytes = 48 << 20;
// Most bytes of likeliest tokens, which travel in the same message.
inline constexpr int64_t kMaxTopBytes = 8 << 20;

// The images of a prompt as each lane reads them, senior first; nullptr for text alone, and for a
// lane that the prompt does not need.
using LaneImages = std::array<std::shared_ptr<const PromptImages>, 2>;

// Implements Engine::Validate. A prompt must leave room for one response token; a response is cut
// at LongestResponse with finish reason kLength. OUT_OF_RANGE names the lane whose limit a prompt
// meets: the senior's, and the smaller one of both where the junior writes tokens or drafts.
// UNIMPLEMENTED for a record of the routing of a senior with windows, OUT_OF_RANGE for one of more
// than kMaxRoutingBytes, and for likeliest tokens of more than kMaxTopBytes. Errors of ImagesOf for
// the prompt's images.
absl::Status CheckPrompt(const PromptRequest& request, const RequestLimits& limits);

// Returns the images of a request. INVALID_ARGUMENT with "vision_inputs" or "vision_inputs[i]"
// (MakePromptImages); FAILED_PRECONDITION (NO_IMAGES) for a junior that would have to read them and
// cannot.
absl::StatusOr<LaneImages> ImagesOf(const PromptRequest& request, const RequestLimits& limits);

// The same for a sequence that one lane scores.
absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(const ScoreSequence& sequence,
                                                             const Blobs& blobs, size_t lane,
                                                             const RequestLimits& limits);

// Returns the most tokens of a response to a request that CheckPrompt accepts: max_tokens, or what
// the prompt leaves.
int32_t LongestResponse(const PromptRequest& request, const RequestLimits& limits);

// Checks the request of Engine::Score. INVALID_ARGUMENT, OUT_OF_RANGE for a sequence that is too
// long, FAILED_PRECONDITION without the junior that the request needs; errors of ImagesOf.
absl::Status CheckScore(const ScoreRequest& request, const RequestLimits& limits);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_REQUEST_CHECK_H_
