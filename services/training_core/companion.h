// A small model that trains beside the core's model on the same passes, or alone where the core's
// is frozen, and that every rank holds whole. The core's weights, digest and exports do not have
// it; its checkpoints do.
#ifndef TANDEM_SERVICES_TRAINING_CORE_COMPANION_H_
#define TANDEM_SERVICES_TRAINING_CORE_COMPANION_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/aten/tensor_copies.h"
#include "services/training_core/engine.h"

namespace tandem::training {

// Writes a companion's state into the directory of a checkpoint.
using CompanionWriter = std::function<absl::Status(const std::string& directory)>;

// Called on the engine thread of every rank; every rank makes the same calls. Functions may throw
// c10::Error.
class Companion {
 public:
  virtual ~Companion() = default;

  // Makes the update whose gradients the last UpdateGradients left. Called once the core's own
  // update is applied, or in its place where the core's model is frozen, and at no other time.
  virtual absl::Status Update() = 0;
  // Number of updates that were made.
  virtual int64_t updates() const = 0;

  // Writes files into the directory of a checkpoint. Called on rank 0 alone.
  virtual absl::Status Save(const std::string& directory) = 0;
  // Adds copies of what Save writes to `copies`. Returns what writes them, when they have their
  // values: it may run on another thread, while the companion trains. Called on rank 0 alone.
  virtual absl::StatusOr<CompanionWriter> Copy(TensorCopies& copies) = 0;

  // Read and check a state, and change nothing: the one in a checkpoint, or that of the start.
  // Where the checkpoint has none of the companion, it goes on with its present weights if they are
  // `intact`, else with those of the start, and in both cases with a fresh optimizer.
  // INVALID_ARGUMENT and DATA_LOSS name the file.
  virtual absl::Status ReadCheckpoint(const LoadRequest& request, bool intact) = 0;
  virtual absl::Status ReadInitial() = 0;
  // Returns the directory that ReadInitial reads; empty if it reads none.
  virtual std::string initial_directory() const = 0;
  // Takes over the state that was read last.
  virtual void Adopt() = 0;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_COMPANION_H_
