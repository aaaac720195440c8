// The time limits of the ranks of a server for each other. No torch.
#ifndef TANDEM_COMMON_RANKS_RANK_TIMEOUTS_H_
#define TANDEM_COMMON_RANKS_RANK_TIMEOUTS_H_

#include "absl/time/time.h"

namespace tandem::ranks {

struct RankTimeouts {
  // For all ranks to join at the start, and for one collective.
  absl::Duration collective = absl::Minutes(10);
  // Without a heartbeat, after which a rank counts as lost.
  absl::Duration silence = absl::Seconds(15);
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_RANK_TIMEOUTS_H_
