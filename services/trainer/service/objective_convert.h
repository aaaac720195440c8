// Objectives of the contract as the engine takes them: every default of the proto comments. Errors
// are INVALID_ARGUMENT with the field's name.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_

#include "absl/status/statusor.h"
#include "services/trainer/engine/objective.h"
#include "tandem/trainer/v1/objective.pb.h"

namespace tandem::trainer {

absl::StatusOr<PolicyObjective> FromProto(const v1::PolicyObjective& proto);
absl::StatusOr<SupervisedObjective> FromProto(const v1::SupervisedObjective& proto);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
