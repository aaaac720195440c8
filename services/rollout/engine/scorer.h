// Teacher-forced log-probabilities through the same runner, and so the same numbers, as generation.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/model_runner.h"

namespace tandem::rollout {

// Sequences that are scored at the same time; a runner needs as many slots beyond the generator's.
inline constexpr int64_t kScoreSlots = 8;

// Log-probs of every sequence's tokens from first_scored_token on, at `temperature`. A pass
// consumes at most `max_batched_tokens`. `check` is asked before every pass; its error ends the
// work.
absl::StatusOr<std::vector<std::vector<float>>> ScoreWith(
    ModelRunner& runner, std::span<const ScoreSequence> sequences, double temperature,
    int64_t max_batched_tokens, const std::function<absl::Status()>& check);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_
