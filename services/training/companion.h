// A small model that trains beside the core's model on the same passes, and that every rank holds
// whole. The core's weights, digest and exports do not have it; its checkpoints do.
#ifndef TANDEM_SERVICES_TRAINING_COMPANION_H_
#define TANDEM_SERVICES_TRAINING_COMPANION_H_

#include <string>

#include "absl/status/status.h"

namespace tandem::training {

// Called on the engine thread of every rank; every rank makes the same calls. Functions may throw
// c10::Error.
class Companion {
 public:
  virtual ~Companion() = default;

  // Makes the update whose gradients the last UpdateGradients left. Called once the core's own
  // update is applied, and at no other time.
  virtual absl::Status Update() = 0;

  // Writes files into the directory of a checkpoint. Called on rank 0 alone.
  virtual absl::Status Save(const std::string& directory) = 0;

  // Read and check a state, and change nothing: the one in a checkpoint, or that of the start.
  // INVALID_ARGUMENT and DATA_LOSS name the file.
  virtual absl::Status ReadCheckpoint(const std::string& directory) = 0;
  virtual absl::Status ReadInitial() = 0;
  // Takes over the state that was read last.
  virtual void Adopt() = 0;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_COMPANION_H_
