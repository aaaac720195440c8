// Checkpoints of a model in training: a Hugging Face directory, the optimizer's state, and the
// engine's own state as JSON, in one atomic step directory (common/checkpoint).
//
// model.safetensors holds whole tensors, whatever ranks they were on; the optimizer's state is in
// one file a rank, each of which says which slices of which tensors it holds
// (common/parallel/optimizer_state.h). What is read does not depend on the ranks that wrote it.
//
// Every rank makes these calls, on one file system that all see. Rank 0 owns the directory and
// commits it, when all have written their part: until then the old checkpoint is there, and from
// then on the new one. An error of one rank is that of all.
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
#include "common/training/training_state.h"

namespace tandem::training {

// Writes directory/name and then removes the oldest checkpoints of this kind until
// `keep` are left, never the one just written (0: all stay). Of the model, a rank holds one block
// beside its part.
absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               parallel::Strategy& strategy,
                                               const TrainingState& state);

// What a step directory holds beside the optimizer's state.
struct TrainingCheckpoint {
  SourceParameters weights;  // exactly the model's parameters, in the memory of the file
  TrainingState state;
};

// Verifies and reads a step directory. NOT_FOUND, DATA_LOSS naming the file (and the tensor that no
// training leaves, one with a number that is not finite), FAILED_PRECONDITION if
// it is another kind's, INVALID_ARGUMENT if it is another model's.
absl::StatusOr<TrainingCheckpoint> ReadTraining(const std::string& path,
                                                parallel::Strategy& strategy,
                                                const std::string& kind);

// Writes the model as a plain Hugging Face directory, complete or not at all. Errors name "path":
// ALREADY_EXISTS if it exists, else as FileError says.
absl::Status ExportModel(parallel::Strategy& strategy, const std::string& path, DType dtype);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_
