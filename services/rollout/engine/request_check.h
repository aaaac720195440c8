// Checks of requests. Errors have the field's path.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_REQUEST_CHECK_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_REQUEST_CHECK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct RequestLimits {
  int64_t num_token_ids = 0;
  int64_t max_model_len = 0;         // of the senior
  int64_t junior_max_model_len = 0;  // of the junior, if there is one
  int64_t max_samples = 0;           // of one prompt
  bool has_junior = false;
  int64_t speculator_heads = 0;  // of the senior's speculator; 0: there is none
  // The ids that stand for images in either model: prompts cannot hold them.
  std::vector<int32_t> image_token_ids = {};
};

// Implements Engine::Validate. A prompt must leave room for one response token; a response is cut
// at LongestResponse with finish reason kLength. OUT_OF_RANGE names the lane whose limit a prompt
// meets: the senior's, and the smaller one of both where the junior writes tokens or drafts.
// UNIMPLEMENTED for a prompt with images.
absl::Status CheckPrompt(const PromptRequest& request, const RequestLimits& limits);

// Returns the most tokens of a response to a request that CheckPrompt accepts: max_tokens, or what
// the prompt leaves.
int32_t LongestResponse(const PromptRequest& request, const RequestLimits& limits);

// Checks the request of Engine::Score. INVALID_ARGUMENT, OUT_OF_RANGE for a sequence that is too
// long, FAILED_PRECONDITION without the junior that the request needs.
absl::Status CheckScore(const ScoreRequest& request, const RequestLimits& limits);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_REQUEST_CHECK_H_
