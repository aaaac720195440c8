// The state of an engine that trains, beside its tensors, and the admission of its steps.
#ifndef TANDEM_COMMON_STEPS_TRAINING_STATE_H_
#define TANDEM_COMMON_STEPS_TRAINING_STATE_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/steps/kept_values.h"
#include "common/steps/step_ledger.h"
#include "common/steps/weights_lineage.h"

namespace tandem::training {

// Saved in the same checkpoint as the weights.
struct TrainingState {
  std::string kind;     // "trainer" or "critic"
  int64_t version = 0;  // of the weights
  StepLedger ledger = StepLedger();
  WeightsLineage lineage = WeightsLineage();
  KeptValues kept_values = KeptValues();  // empty in a trainer
};

// Returns everything but the kept values themselves (KeptValues::Bytes).
nlohmann::json ToJson(const TrainingState& state);
// DATA_LOSS for a document that ToJson did not make, such as one with a version that no run
// reaches, and for kept values that do not fit it.
absl::StatusOr<TrainingState> TrainingStateFromJson(const nlohmann::json& object,
                                                    absl::string_view kept_values = {});

// The names of a step, and the version of the weights that it was made for.
struct StepIdentity {
  std::string run_id;
  int64_t step = 0;
  std::string request_id;
  std::string payload_digest;  // of everything in the request
  int64_t expected_version = 0;
  bool defer_digest = false;  // the report needs no digest of the weights

  bool operator==(const StepIdentity&) const = default;
};

// Longest run_id, request_id and group_id, in bytes. Checkpoints hold tables of these ids.
inline constexpr size_t kMaxIdBytes = 256;

// INVALID_ARGUMENT naming `field` for an id that is too long. An empty one passes.
absl::Status CheckIdLength(absl::string_view field, absl::string_view id);

// INVALID_ARGUMENT naming the id that is missing or too long.
absl::Status CheckStepNames(absl::string_view run_id, absl::string_view request_id);

// Returns the stored report of a step that was done before, and nothing for one to do.
// INVALID_ARGUMENT for an incomplete identity; ALREADY_EXISTS (reason REQUEST_ID_REUSED);
// FAILED_PRECONDITION (reason STALE_POLICY_VERSION) naming "expected_version".
absl::StatusOr<std::optional<StepReport>> AdmitStep(const TrainingState& state,
                                                    const StepIdentity& identity);

// FAILED_PRECONDITION (reason STALE_POLICY_VERSION) naming "expected_version".
absl::Status CheckExpectedVersion(const TrainingState& state, int64_t expected_version);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_TRAINING_STATE_H_
