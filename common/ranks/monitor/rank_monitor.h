// Finds lost ranks by their heartbeats, and ends the processes of the others.
#ifndef TANDEM_COMMON_RANKS_MONITOR_RANK_MONITOR_H_
#define TANDEM_COMMON_RANKS_MONITOR_RANK_MONITOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/machine/rank_environment.h"

namespace tandem::ranks {

struct RankMonitorOptions {
  // Logs the event "rank_failure" and ends the process with exit code 1, at once: other threads may
  // be blocked in a collective with the lost rank.
  [[noreturn]] static void EndProcess(const std::string& failure);

  // After this time without a beat a rank counts as lost. Ranks beat once a second, and at least
  // eight times in this time.
  absl::Duration silence;
  // Called at most once, on a thread of the monitor, with "rank 3 (pid 123 on host) has been silent
  // for 15s", or with "rank 2: " and the message of that rank's Fail. The same on all ranks.
  std::function<void(const std::string& failure)> on_failure = EndProcess;
};

// The heartbeats of one rank. Every rank of a world has a monitor, which beats in the store that
// rank 0 hosts, and reads the beats of the others. A rank is lost if it does not beat for
// `silence`: it is dead, stopped or cut off. All others notice within about twice `silence`, also
// where rank 0 is lost. A machine that stands still with all ranks, because it is moved or
// suspended, loses none. A world of one rank has no heartbeats.
//
// Thread-safe, but for the destructor.
class RankMonitor {
 public:
  // Starts the beats. Returns when the store has answered; does not wait for the other ranks, which
  // have `silence` to start theirs. UNAVAILABLE, with the address, as RankStore::Connect.
  static absl::StatusOr<std::unique_ptr<RankMonitor>> Start(const RankEnvironment& environment,
                                                            RankMonitorOptions options);
  // The others take this rank for lost unless it called Leave or Fail before.
  ~RankMonitor();
  RankMonitor(const RankMonitor&) = delete;
  RankMonitor& operator=(const RankMonitor&) = delete;

  // Returns a number that changes when another rank has advanced (common/base/progress.h), at the
  // latest some two beats afterwards. 0 in a world of one.
  int64_t progress_of_others() const;

  // Ends the monitor because this rank gives up: the others' on_failure gets "rank <r>: <message>".
  // This rank's own is not called.
  void Fail(const std::string& message);

  // Ends the monitor because this rank is done: the others do not miss it.
  //
  // On rank 0, which takes the store with it, Fail and Leave return when all others know, or after
  // `silence`.
  void Leave();

 private:
  class Watch;
  RankMonitor() = default;

  std::shared_ptr<Watch> watch_;  // nullptr for a single rank
  std::thread beats_, store_watch_;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_MONITOR_RANK_MONITOR_H_
