// A step as the table of done steps remembers it.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEP_RECORD_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEP_RECORD_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/trainer/engine/engine.h"

namespace tandem::trainer {

// XXH3-128 over every field of the request: two requests with the same digest ask for the same.
std::string PayloadDigest(const TrainStepRequest& request);

// JSON and back, exactly. DATA_LOSS for a text that EncodeReport did not write.
std::string EncodeReport(const StepReport& report);
absl::StatusOr<StepReport> DecodeReport(absl::string_view text);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEP_RECORD_H_
