// Objectives of the contract and as the engine takes them: every default of the proto comments.
// Errors carry the field's name.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "services/trainer/engine/objective.h"
#include "tandem/config/v1/server_config.pb.h"
#include "tandem/trainer/v1/objective.pb.h"

namespace tandem::trainer {

// INVALID_ARGUMENT for a choice that the contract does not know.
absl::StatusOr<PolicyObjective> FromProto(const v1::PolicyObjective& proto);
absl::StatusOr<SupervisedObjective> FromProto(const v1::SupervisedObjective& proto);

// Sets every field: what is in force.
v1::PolicyObjective ToProto(const PolicyObjective& objective);

// FromProto and CheckObjective: what a trainer says to an objective before it reads a sample. Paths
// begin with "policy".
absl::StatusOr<PolicyObjective> ResolveObjective(const v1::PolicyObjective& proto,
                                                 const ObjectiveSupport& support);

// What a trainer with this configuration supports.
ObjectiveSupport SupportOf(const config::v1::TrainerServerConfig& config);

// The same for a trainer that need not run: from the JSON of an objective, in protobuf's mapping,
// to that of the one in force, in one line. INVALID_ARGUMENT ("policy") for what is no such JSON.
absl::StatusOr<std::string> ResolveObjectiveJson(const std::string& json,
                                                 const ObjectiveSupport& support);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
