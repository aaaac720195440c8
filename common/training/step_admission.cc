#include "common/training/step_admission.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem::training {

absl::StatusOr<std::optional<std::string>> AdmitStep(const TrainingState& state,
                                                     const StepIdentity& identity,
                                                     absl::string_view version_field) {
  if (identity.run_id.empty()) return InvalidField("run_id", "is missing");
  if (identity.request_id.empty()) return InvalidField("request_id", "is missing");
  if (identity.step < 0) return InvalidField("step", "must not be negative");
  TANDEM_ASSIGN_OR_RETURN(
      std::optional<std::string> stored,
      state.ledger.Find(identity.run_id, identity.request_id, identity.payload_digest));
  if (stored.has_value() || identity.expected_version == state.version) return stored;
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, version_field,
                               absl::StrCat("is ", identity.expected_version, ", the ", state.kind,
                                            " is at ", state.version)),
                    reason::kStalePolicyVersion);
}

}  // namespace tandem::training
