// A value step without tensors: what is refused, and what counts.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "common/training/sequence_check.h"
#include "services/critic/engine/types.h"

namespace tandem::critic {

// Paths from "value_clip" or "samples[i]." on. INVALID_ARGUMENT, OUT_OF_RANGE for too long or too
// many; a batch in which no token counts is INVALID_ARGUMENT.
absl::Status CheckTrainStep(const TrainStepRequest& request, const training::SequenceLimits& limits,
                            int64_t max_samples);

// Whether response token `t` counts in the loss.
inline bool Counts(const ValueSample& sample, size_t t) {
  return sample.loss_mask.empty() || sample.loss_mask[t] != 0;
}

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
