// The time limits of the ranks of a server for each other. No torch.
#ifndef TANDEM_COMMON_RANKS_MONITOR_RANK_TIMEOUTS_H_
#define TANDEM_COMMON_RANKS_MONITOR_RANK_TIMEOUTS_H_

#include "absl/time/time.h"

namespace tandem::ranks {

struct RankTimeouts {
  // For all ranks to join at the start, and for one collective.
  absl::Duration collective;
  // Without a heartbeat, after which a rank counts as lost.
  absl::Duration silence;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_MONITOR_RANK_TIMEOUTS_H_
