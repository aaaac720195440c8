// Between tandem.trainer.v1 and the engine's plain structs: every default of the proto comments,
// and the checks that need no model. Errors are INVALID_ARGUMENT with a field path that is relative
// to the converted message; callers put "header" or "samples[i]" in front.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "services/trainer/engine/types.h"
#include "tandem/trainer/v1/trainer.pb.h"

namespace tandem::trainer {

// The header of a train step: all of it but the samples.
struct StepHeader {
  std::string run_id;
  int64_t step = 0;
  std::string request_id;
  int64_t expected_version = 0;
  int64_t num_samples = 0;  // at least 1
  std::variant<PolicyObjective, SupervisedObjective> objective;

  bool is_policy() const { return std::holds_alternative<PolicyObjective>(objective); }
};

// num_samples above `max_samples` is OUT_OF_RANGE; errors of the objective as CheckObjective says.
absl::StatusOr<StepHeader> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples,
                                     const ObjectiveSupport& support);

// Shapes, numbers that are not finite and what the objective requires of a sample are refused here;
// what the model must judge (ids, lengths, versions, authorship) is the engine's.
absl::StatusOr<PolicySample> FromProto(const v1::PolicySample& proto);
absl::StatusOr<SupervisedSample> FromProto(const v1::SupervisedSample& proto);

absl::StatusOr<LogProbsRequest> FromProto(const v1::ComputeLogProbsRequest& proto);
v1::ComputeLogProbsResponse ToProto(const LogProbsResult& result);

v1::StepReport ToProto(const StepReport& report);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_CONVERT_H_
