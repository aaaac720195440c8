// How long the ranks of a server wait for each other. No torch.
#ifndef TANDEM_COMMON_PARALLEL_RANK_TIMEOUTS_H_
#define TANDEM_COMMON_PARALLEL_RANK_TIMEOUTS_H_

#include "absl/time/time.h"

namespace tandem::parallel {

struct RankTimeouts {
  // At the start, and in a collective.
  absl::Duration collective = absl::Minutes(10);
  // After which a silent rank counts as lost.
  absl::Duration silence = absl::Seconds(15);
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RANK_TIMEOUTS_H_
