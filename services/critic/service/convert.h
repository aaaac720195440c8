// Conversions between tandem.critic.v1 and the engine's plain structs, with the defaults of the
// proto comments and the checks that need no model. Errors are INVALID_ARGUMENT with a field path
// that is relative to the converted message; callers put "header", "samples[i]" or "requests[i]" in
// front.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_CONVERT_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_CONVERT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/critic/engine/types.h"
#include "tandem/critic/v1/critic.pb.h"

namespace tandem::critic {

// Returns the request without its samples. OUT_OF_RANGE for num_samples above `max_samples`.
absl::StatusOr<TrainStepRequest> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples);
absl::StatusOr<ValueSample> FromProto(const v1::ValueSample& proto);
absl::StatusOr<ValuesRequest> FromProto(const v1::ComputeValuesRequest& proto);

v1::ComputeValuesResponse ToProto(const ValuesResult& result);
v1::TrainStepResponse ToProto(const StepResult& result);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_CONVERT_H_
