// A value step without tensors: what is refused, and how the table of done steps remembers it.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/training/sequence_check.h"
#include "services/critic/engine/engine.h"

namespace tandem::critic {

// Paths from "value_clip" or "samples[i]." on. INVALID_ARGUMENT, OUT_OF_RANGE for too long or too
// many; a batch in which no token counts is INVALID_ARGUMENT.
absl::Status CheckTrainStep(const TrainStepRequest& request, const training::SequenceLimits& limits,
                            int64_t max_samples);

// Whether response token `t` counts in the loss.
inline bool Counts(const ValueSample& sample, size_t t) {
  return sample.loss_mask.empty() || sample.loss_mask[t] != 0;
}

// XXH3-128 over every field of the request.
std::string PayloadDigest(const TrainStepRequest& request);

// The reply that the table of done steps keeps, as JSON. DATA_LOSS for another text.
std::string EncodeResult(const TrainStepResult& result);
absl::StatusOr<TrainStepResult> DecodeResult(absl::string_view text);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
