// Conversions between tandem.trainer.v1 and the engine's plain structs, with the defaults of the
// proto comments and the checks that need no model. Errors are INVALID_ARGUMENT with a field path
// that is relative to the converted message; callers put "header" or "samples[i]" in front.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/trainer/engine/types.h"
#include "tandem/trainer/v1/trainer.pb.h"

namespace tandem::trainer {

// Returns the request without its samples. num_samples above `max_samples` is OUT_OF_RANGE; errors
// of the objective as CheckObjective says.
absl::StatusOr<TrainStepRequest> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples,
                                           const ObjectiveSupport& support);

// Convert a sample. Refuse wrong shapes and numbers that are not finite; the engine checks ids,
// lengths, versions and authorship.
absl::StatusOr<PolicySample> FromProto(const v1::PolicySample& proto);
absl::StatusOr<SupervisedSample> FromProto(const v1::SupervisedSample& proto);

absl::StatusOr<LogProbsRequest> FromProto(const v1::ComputeLogProbsRequest& proto);
v1::ComputeLogProbsResponse ToProto(const LogProbsResult& result);

v1::StepReport ToProto(const StepReport& report);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_
