// Conversions between objectives of the contract and of the engine, with the defaults of the proto
// comments. Errors name the field.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "services/trainer/engine/steps/objective.h"
#include "tandem/config/v1/server_config.pb.h"
#include "tandem/trainer/v1/objective.pb.h"

namespace tandem::trainer {

// INVALID_ARGUMENT for a value that an enum of the contract lacks.
absl::StatusOr<PolicyObjective> FromProto(const v1::PolicyObjective& proto);
absl::StatusOr<SupervisedObjective> FromProto(const v1::SupervisedObjective& proto);

// Returns the objective in force: every field is set.
v1::PolicyObjective ToProto(const PolicyObjective& objective);

// Converts and checks an objective, as a trainer does before it reads a sample. Paths begin with
// "policy".
absl::StatusOr<PolicyObjective> ResolveObjective(const v1::PolicyObjective& proto,
                                                 const ObjectiveSupport& support);

// Returns the support of a trainer with this configuration.
ObjectiveSupport SupportOf(const config::v1::TrainerServerConfig& config);

// ResolveObjective for a trainer that need not run: takes an objective as in a run file, YAML or
// JSON, and returns the objective in force as one line of JSON in protobuf's mapping.
// INVALID_ARGUMENT ("policy…") for an unknown key, with a suggestion, and for any other text.
absl::StatusOr<std::string> ResolveObjectiveText(const std::string& text,
                                                 const ObjectiveSupport& support);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_OBJECTIVE_CONVERT_H_
