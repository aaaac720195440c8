// Checks of a value step, and the tokens that count in it. No tensors.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "common/steps/sequence_check.h"
#include "services/critic/engine/types.h"

namespace tandem::critic {

// INVALID_ARGUMENT with a path that begins with "value_clip" or "samples[i].", also for a batch in
// which no token counts; OUT_OF_RANGE for too many samples or a sequence that is too long.
absl::Status CheckTrainStep(const TrainStepRequest& request, const training::SequenceLimits& limits,
                            int64_t max_samples);

// Whether the samples of a checked step have weights.
inline bool HasWeights(const TrainStepRequest& request) {
  return !request.samples.front().weights.empty();
}

// Whether response token `t` counts in the loss of a step without weights.
inline bool Counts(const ValueSample& sample, size_t t) {
  return sample.loss_mask.empty() || sample.loss_mask[t] != 0;
}

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_VALUE_STEP_H_
