// Notices that a rank is lost, and ends the others.
#ifndef TANDEM_COMMON_PARALLEL_RANK_MONITOR_H_
#define TANDEM_COMMON_PARALLEL_RANK_MONITOR_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/rank_environment.h"

namespace tandem::parallel {

struct RankMonitorOptions {
  // Logs the event "rank_failure" and ends the process with exit code 1, at once: other threads may
  // wait for the lost rank inside a collective, and cannot be stopped.
  [[noreturn]] static void EndProcess(const std::string& failure);

  // Of a rank that counts as lost. Ranks beat once a second, or eight times in so long if that is
  // more often.
  absl::Duration silence = absl::Seconds(15);
  // Called at most once, from a thread of the monitor, with "rank 3 (pid 123 on host) has been
  // silent for 15s", or "rank 2: " and the message of its Fail. The text is the same on all ranks.
  std::function<void(const std::string& failure)> on_failure = EndProcess;
};

// Every rank of a world has one, and beats in the store that rank 0 hosts. A rank is lost if it
// does not beat for `silence`: dead, stopped, or cut off. All others notice within about twice
// `silence`, also if it is rank 0. A machine that stands still with all of them, as one that is
// moved or suspended, loses none. A world of one has nobody to watch.
//
// Thread-safe, but for the destructor.
class RankMonitor {
 public:
  // Returns when the store was reached; does not wait for the other ranks, which have `silence` to
  // start theirs. UNAVAILABLE, with the address, if the store was not reached within `silence`.
  static absl::StatusOr<std::unique_ptr<RankMonitor>> Start(const RankEnvironment& environment,
                                                            RankMonitorOptions options);
  // Without Leave or Fail before, the others will find this rank silent.
  ~RankMonitor();
  RankMonitor(const RankMonitor&) = delete;
  RankMonitor& operator=(const RankMonitor&) = delete;

  // This rank gives up: the others' on_failure gets "rank <r>: <message>". Its own is not called.
  void Fail(const std::string& message);

  // This rank is done: its silence to come is no failure.
  //
  // Both end the monitor. On rank 0, which takes the store with it, they return when all others
  // know, or after `silence`.
  void Leave();

 private:
  class Watch;
  RankMonitor() = default;

  std::shared_ptr<Watch> watch_;  // none for a single rank
  std::thread beats_, store_watch_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RANK_MONITOR_H_
