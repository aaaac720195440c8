// Checkpoints of a model in training: a Hugging Face directory, the optimizer's state, and the
// engine's own state as JSON, in one atomic step directory (common/checkpoint).
//
// model.safetensors holds whole tensors, however the ranks shard them. The optimizer's state is in
// one file per rank, which lists its slices of tensors
// (common/parallel/optimizer/optimizer_state.h); a frozen model has none. Any layout of ranks reads
// what any other wrote.
//
// Every rank makes these calls, on one file system that all ranks see. Rank 0 creates the directory
// and commits it once all ranks have written their files: the old checkpoint is there until then,
// and the new one afterwards. An error of one rank is returned on all.
#ifndef TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_
#define TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/tensor/dtype.h"
#include "common/training/training_state.h"
#include "services/training/companion.h"

namespace tandem::training {

// Writes directory/name and then removes the oldest checkpoints of this kind and run until `keep`
// are left, never the one just written nor one with a path of `in_use` (0: all stay). A rank holds
// one block of the model beside its shard. `companion`, unless it is nullptr, adds its own files.
absl::StatusOr<checkpoint::Saved> SaveTraining(const std::string& directory,
                                               const std::string& name, int64_t keep,
                                               parallel::Strategy& strategy,
                                               const TrainingState& state,
                                               Companion* companion = nullptr,
                                               const std::vector<std::string>& in_use = {});

// The contents of a step directory beside the optimizer's state.
struct TrainingCheckpoint {
  SourceParameters weights;  // exactly the model's parameters, in the mapped file
  TrainingState state;
};

// Verifies and reads a step directory. NOT_FOUND; DATA_LOSS naming the file, and the tensor if it
// has a number that is not finite; FAILED_PRECONDITION for a checkpoint of another kind;
// INVALID_ARGUMENT for one of another model.
absl::StatusOr<TrainingCheckpoint> ReadTraining(const std::string& path,
                                                parallel::Strategy& strategy,
                                                const std::string& kind);

// Writes the model as a plain Hugging Face directory, complete or not at all. Errors name "path":
// ALREADY_EXISTS, else as FileError says.
absl::Status ExportModel(parallel::Strategy& strategy, const std::string& path, DType dtype);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_TRAINING_CHECKPOINT_H_
