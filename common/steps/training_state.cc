#include "common/steps/training_state.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::training {

using nlohmann::json;

namespace {

// Counting on from it overflows nothing, and a double represents it exactly.
constexpr int64_t kMaxVersion = int64_t{1} << 53;

}  // namespace

absl::Status CheckIdLength(absl::string_view field, absl::string_view id) {
  if (id.size() <= kMaxIdBytes) return absl::OkStatus();
  return InvalidField(
      field, absl::StrCat("has ", id.size(), " bytes, at most ", kMaxIdBytes, " are allowed"));
}

absl::Status CheckStepNames(absl::string_view run_id, absl::string_view request_id) {
  TANDEM_RETURN_IF_ERROR(CheckGiven("run_id", run_id));
  TANDEM_RETURN_IF_ERROR(CheckIdLength("run_id", run_id));
  TANDEM_RETURN_IF_ERROR(CheckGiven("request_id", request_id));
  return CheckIdLength("request_id", request_id);
}

json ToJson(const TrainingState& state) {
  return {{"kind", state.kind},
          {"version", state.version},
          {"done_steps", state.ledger.ToJson()},
          {"lineage", state.lineage.ToJson()},
          {"kept_values", state.kept_values.ToJson()}};
}

absl::StatusOr<TrainingState> TrainingStateFromJson(const json& object,
                                                    absl::string_view kept_values) {
  TrainingState state;
  try {
    state.kind = object.at("kind");
    const json& version = object.at("version");
    if (!version.is_number_integer() || version < 0 || version > kMaxVersion) {
      return absl::DataLossError(absl::StrCat("no run can reach version ", version.dump()));
    }
    state.version = version;
    TANDEM_RETURN_IF_ERROR(state.ledger.FromJson(object.at("done_steps")));
    TANDEM_RETURN_IF_ERROR(state.lineage.FromJson(object.at("lineage")));
    TANDEM_RETURN_IF_ERROR(state.kept_values.FromJson(object.at("kept_values"), kept_values));
  } catch (const json::exception&) {
    return absl::DataLossError("is not a training state");
  }
  return state;
}

absl::StatusOr<std::optional<StepReport>> AdmitStep(const TrainingState& state,
                                                    const StepIdentity& identity) {
  TANDEM_RETURN_IF_ERROR(CheckStepNames(identity.run_id, identity.request_id));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("step", identity.step, 0));
  TANDEM_ASSIGN_OR_RETURN(
      std::optional<StepReport> stored,
      state.ledger.Find(identity.run_id, identity.request_id, identity.payload_digest));
  if (!stored.has_value()) {
    TANDEM_RETURN_IF_ERROR(CheckExpectedVersion(state, identity.expected_version));
  }
  return stored;
}

absl::Status CheckExpectedVersion(const TrainingState& state, int64_t expected_version) {
  if (expected_version == state.version) return absl::OkStatus();
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "expected_version",
                               absl::StrCat("is ", expected_version, ", but the ", state.kind,
                                            " is at ", state.version)),
                    reason::kStalePolicyVersion);
}

}  // namespace tandem::training
