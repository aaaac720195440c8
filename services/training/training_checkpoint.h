// Checkpoints of a model in training: a Hugging Face directory, the optimizer's state, and the
// engine's own state as JSON, in one atomic step directory (common/checkpoint).
#ifndef TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_
#define TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/tensor/dtype.h"
#include "common/tensor/named_tensors.h"
#include "common/training/training_state.h"

namespace tandem::training {

// Writes directory/name and then removes the oldest checkpoints of this kind until
// `keep` are left, never the one just written (0: all stay).
absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               const Model& model, parallel::Strategy& strategy,
                                               const TrainingState& state);

// What a step directory holds beside the optimizer's state.
struct TrainingCheckpoint {
  NamedTensors weights;  // exactly the model's parameters
  TrainingState state;
};

// Verifies and reads a step directory. NOT_FOUND, DATA_LOSS naming the file (and the tensor that no
// training leaves, one with a number that is not finite), FAILED_PRECONDITION if
// it is another kind's, INVALID_ARGUMENT if it is another model's.
absl::StatusOr<TrainingCheckpoint> ReadTraining(const std::string& path, const Model& model,
                                                const std::string& kind);

// Writes the model as a plain Hugging Face directory, complete or not at all. Errors name "path":
// ALREADY_EXISTS if it exists, else as FileError says.
absl::Status ExportModel(const Model& model, const std::string& path, DType dtype);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_
