// Checks of the engine's options before anything is loaded. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_OPTIONS_CHECK_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_OPTIONS_CHECK_H_

#include "absl/status/status.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// Returns, with the path of the setting: INVALID_ARGUMENT for options out of range;
// FAILED_PRECONDITION for a model directory that is no snapshot of the commit that
// "senior.model_revision" or "junior.model_revision" names; UNIMPLEMENTED for what the engine
// lacks.
absl::Status CheckOptions(const EngineOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_OPTIONS_CHECK_H_
