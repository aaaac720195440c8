// The conclusions of a rank from the heartbeats of the others: which rank is lost, which has left,
// and whether the store still answers. Pure logic without torch; rank_monitor.h has the threads,
// the clock and the store.
#ifndef TANDEM_COMMON_RANKS_MONITOR_HEARTBEATS_H_
#define TANDEM_COMMON_RANKS_MONITOR_HEARTBEATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {

// Records that a rank writes into the store. Before its first one a rank's record is empty.
// "beat <count> <progress> (pid <pid> on <host>)", this process's; `progress` is ProgressCount().
std::string BeatRecord(int64_t count, int64_t progress);
std::string LeftRecord();
std::string FailedRecord(absl::string_view failure);  // `failure` is what all ranks report

// The records of all ranks, as one of them has read them. Times are of any clock that goes on
// while the machine does.
class Heartbeats {
 public:
  // The view of `rank` among `world_size` ranks. The others have `silence` from `now` on for their
  // first beat.
  Heartbeats(int rank, int world_size, absl::Duration silence, SteadyTime now);

  // Takes over the records of all ranks, read from the store at `now`. If more than half of
  // `silence` has passed since the last call, this process, perhaps with its whole machine, stood
  // still: then no silence up to now counts.
  void Update(const std::vector<std::string>& records, SteadyTime now);
  SteadyTime last_update() const { return last_update_; }

  // Returns the failure that another rank has reported, or "rank 3 (pid 123 on host) has been
  // silent for 15s" for a rank whose record has not changed for `silence`. Empty if there is none.
  std::string FindFailure() const;

  // Whether rank 0, and with it the store, is about to go.
  bool host_has_left() const;
  // Whether every other rank has written its last record, or has been silent for half of `silence`.
  bool OthersHaveConcluded() const;

  // Returns a number that changes when another rank has advanced (the sum of their progress).
  int64_t progress_of_others() const;

  // Returns " (pid 123 on host)", from the rank's beats; empty before the first.
  const std::string& process(int rank) const { return peers_[static_cast<size_t>(rank)].process; }

 private:
  struct Peer {
    std::string record, process;
    SteadyTime changed;
    int64_t progress = 0;
  };

  const int rank_;
  const absl::Duration silence_;
  SteadyTime last_update_;
  std::vector<Peer> peers_;
};

// Tells when the store has not answered for `silence`. It is asked once in every quarter of that
// time, so that a machine that stood still, however long, has missed one quarter.
class StoreSilence {
 public:
  static constexpr int kQuarters = 4;
  // `last_answer` is when the store last answered. Returns whether it has missed four quarters.
  bool MissedAll(SteadyTime last_answer);

 private:
  SteadyTime seen_ = SteadyTime::InfinitePast();
  int missed_ = 0;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_MONITOR_HEARTBEATS_H_
