// Writes checkpoints beside the engine thread, one at a time.
//
// On rank 0 whoever saves or loads reserves the writer first. The engine thread copies the state
// and calls Start, whose save holds the reservation until it is written. Other ranks only call
// Start.
#ifndef TANDEM_SERVICES_TRAINING_CORE_CHECKPOINT_WRITER_H_
#define TANDEM_SERVICES_TRAINING_CORE_CHECKPOINT_WRITER_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/engine_thread.h"
#include "common/checkpoint/checkpoint.h"
#include "common/ranks/communicator.h"
#include "services/training_core/engine.h"
#include "services/training_core/training_checkpoint.h"

namespace tandem::training {

// Thread-safe.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& name, absl::Duration stall_limit);

  // A save from its reservation on.
  class Save;

  // Returns the outcome of the background save that `request` asked for before, once it has one, or
  // `pending` where the request does not wait: a checkpoint of the same place and version that is
  // being written, stands, or failed. A failure is told once. Nothing: this is another save.
  std::optional<absl::StatusOr<checkpoint::Saved>> Join(const CallScope& call,
                                                        const SaveRequest& request);

  // Reserves the writer, once the save before is written. CANCELLED, DEADLINE_EXCEEDED.
  absl::StatusOr<std::shared_ptr<Save>> Reserve(const CallScope& call);
  // Ends a reservation without a save.
  void Release(const std::shared_ptr<Save>& save);

  // Writes `started` on the writer's thread, and meets the other ranks in `ranks`. Calls `done`
  // there with the outcome, before Wait returns. UNAVAILABLE after Shutdown.
  using Done = std::function<void(const absl::StatusOr<checkpoint::Saved>& saved)>;
  absl::Status Start(const SaveRequest& request, StartedSave started,
                     std::shared_ptr<ranks::Communicator> ranks, Done done);

  // Returns the outcome of a save that was started. CANCELLED and DEADLINE_EXCEEDED leave it
  // running.
  absl::StatusOr<checkpoint::Saved> Wait(const CallScope& call, const Save& save);

  // As EngineThread.
  absl::Status Health() const { return thread_.Health(); }
  void NoteProgressOfOthers() { thread_.NoteProgressOfOthers(); }

  // Finishes the running save.
  void Shutdown() { thread_.Shutdown(); }

 private:
  // Waits until `ready`, with the lock held.
  template <typename Ready>
  absl::Status WaitUntil(std::unique_lock<std::mutex>& lock, const CallScope& call, Ready ready);

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::shared_ptr<Save> current_;     // has the writer; nullptr: nobody has
  std::shared_ptr<Save> background_;  // the last save that was asked for in the background
  EngineThread thread_;               // last: it uses everything above
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_CHECKPOINT_WRITER_H_
