// Checkpoints of a model in training: a Hugging Face directory, the optimizer's state, and the
// engine's own state as JSON, in one atomic step directory (common/checkpoint).
#ifndef TANDEM_COMMON_PARALLEL_TRAINING_CHECKPOINT_H_
#define TANDEM_COMMON_PARALLEL_TRAINING_CHECKPOINT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/step_ledger.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/tensor/dtype.h"

namespace tandem::parallel {

// What an engine remembers beside tensors.
struct TrainingState {
  std::string kind;     // "trainer" or "critic"
  int64_t version = 0;  // of the weights
  checkpoint::StepLedger ledger = checkpoint::StepLedger();
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

// Writes directory/name and then removes the oldest checkpoints of this kind until
// `keep` are left, never the one just written (0: all stay).
absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               const Model& model, Strategy& strategy,
                                               const TrainingState& state);

// Loads a step directory into model, optimizer and state. Everything is verified before the first
// change. NOT_FOUND, DATA_LOSS naming the file, FAILED_PRECONDITION if it is another kind's,
// INVALID_ARGUMENT if it is another model's.
absl::Status LoadTraining(const std::string& path, Model& model, Strategy& strategy,
                          TrainingState& state);

// Writes the model as a plain Hugging Face directory, complete or not at all. ALREADY_EXISTS if
// `path` exists.
absl::Status ExportModel(const Model& model, const std::string& path, DType dtype);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TRAINING_CHECKPOINT_H_
