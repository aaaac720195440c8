// Checkpoints of a model in training: a Hugging Face directory, the optimizer's state, and the
// engine's own state as JSON, in one atomic step directory (common/checkpoint).
//
// Every rank writes a file of whole tensors, about 1/ranks of the model's bytes, and its slices of
// the optimizer's state (common/parallel/optimizer/optimizer_state.h); a frozen model has none of
// the latter. Any layout of ranks reads what any other wrote.
//
// A save has two halves. StartSave reserves the directory and, if it is to be written beside
// training, copies the state: of the weights what the rank writes, of the optimizer its own slices.
// Finish writes, on any thread.
//
// Every rank makes these calls, on one file system that all ranks see. A rank computes the digest
// of its files while it writes them, and syncs them itself; nobody reads them again, nor touches
// the files of another rank. Then the ranks meet, without a time limit, and rank 0 commits: the old
// checkpoint is there until then, and the new one afterwards. When they load, every rank compares
// its share of the files with the manifest, and of the weights it reads what it holds. An error of
// one rank is returned on all.
#ifndef TANDEM_SERVICES_TRAINING_CORE_TRAINING_CHECKPOINT_H_
#define TANDEM_SERVICES_TRAINING_CORE_TRAINING_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/files/file_writer.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/ranks/communicator.h"
#include "common/steps/training_state.h"
#include "common/tensor/aten/tensor_copies.h"
#include "common/tensor/dtype.h"
#include "services/training_core/companion.h"

namespace tandem::training {

// The files that a save writes.
struct SaveSource {
  parallel::Strategy& strategy;
  const TrainingState& state;
  Companion* companion = nullptr;  // unless it is nullptr, it adds its own files
};

// A save that was started and has not written its files. Its destructor gives the save up.
class StartedSave {
 public:
  // Directory/name; complete once Finish has returned OK.
  const std::string& path() const { return path_; }

  // Writes the files, meets the other ranks in `ranks`, and commits. Then removes the oldest
  // checkpoints of this kind and run until `keep` are left, never the one just written nor one with
  // a path of `in_use` (0: all stay). An error of one rank is returned on all.
  absl::StatusOr<checkpoint::Saved> Finish(ranks::Communicator& ranks) &&;

 private:
  friend absl::StatusOr<StartedSave> StartSave(const ConfinedPath& directory,
                                               const std::string& name, int64_t keep,
                                               const SaveSource& source, TensorCopies* copies,
                                               const std::vector<std::string>& in_use);
  StartedSave() = default;

  std::string path_;
  ConfinedPath directory_;
  std::string target_;                                     // the directory under construction
  std::optional<checkpoint::PendingCheckpoint> pending_;   // on rank 0 alone
  std::function<absl::Status(const std::string&)> write_;  // this rank's files
  checkpoint::Identity identity_;
  int64_t keep_ = 0;
  std::vector<std::string> in_use_;
};

// Starts to save directory/name. With `copies` Finish may run on another thread, and with another
// process group, while the model and the companion train on: all is copied there, and Finish must
// return before they are used again. Without, nothing may change until Finish returns, in which a
// rank holds one tensor of the model beside its shard.
absl::StatusOr<StartedSave> StartSave(const ConfinedPath& directory, const std::string& name,
                                      int64_t keep, const SaveSource& source, TensorCopies* copies,
                                      const std::vector<std::string>& in_use = {});

// The contents of a step directory beside the optimizer's state.
struct TrainingCheckpoint {
  // Open until the optimizer's state and the companion's are read, too.
  std::shared_ptr<ConfinedFolder> folder;
  SourceParameters weights;  // exactly the model's parameters, in the mapped file
  TrainingState state;
};

// Verifies and reads a step directory. NOT_FOUND; DATA_LOSS naming the file, which is damaged or a
// link, and the tensor if it has a number that is not finite; FAILED_PRECONDITION for a checkpoint
// of another kind; INVALID_ARGUMENT for one of another model.
absl::StatusOr<TrainingCheckpoint> ReadTraining(const ConfinedPath& path,
                                                parallel::Strategy& strategy,
                                                const std::string& kind);

// Writes the model as a plain Hugging Face directory, complete or not at all. Errors name "path":
// ALREADY_EXISTS, else as FileError says.
absl::Status ExportModel(parallel::Strategy& strategy, const ConfinedPath& path, DType dtype);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_TRAINING_CHECKPOINT_H_
