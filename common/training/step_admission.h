// Whether a train step is to be done: once, and only on the weights that it was made for.
#ifndef TANDEM_COMMON_TRAINING_STEP_ADMISSION_H_
#define TANDEM_COMMON_TRAINING_STEP_ADMISSION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/training/step_ledger.h"

namespace tandem::training {

// What an engine remembers beside tensors.
struct TrainingState {
  std::string kind;     // "trainer" or "critic"
  int64_t version = 0;  // of the weights
  StepLedger ledger = StepLedger();
};

// Which step a request is, and the version of the weights that it was made for.
struct StepIdentity {
  std::string run_id;
  int64_t step = 0;
  std::string request_id;
  std::string payload_digest;
  int64_t expected_version = 0;
};

// The stored reply if the step was done before, nothing if it is to be done now. INVALID_ARGUMENT
// for an incomplete identity; ALREADY_EXISTS (reason REQUEST_ID_REUSED); FAILED_PRECONDITION
// (reason STALE_POLICY_VERSION) naming `version_field`.
absl::StatusOr<std::optional<std::string>> AdmitStep(const TrainingState& state,
                                                     const StepIdentity& identity,
                                                     absl::string_view version_field);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_STEP_ADMISSION_H_
