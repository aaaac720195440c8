// A time limit for calls that have none of their own, as a read from a peer that never answers.
#ifndef TANDEM_COMMON_RANKS_DEADLINE_H_
#define TANDEM_COMMON_RANKS_DEADLINE_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {

// How much later than a time limit of c10d the deadline of a call ends: c10d's messages say more.
inline constexpr absl::Duration kC10dGrace = absl::Seconds(2);

// Runs `body` on a thread of its own and returns its result; exceptions become a Status as in
// CatchTorchErrors(what, …). DEADLINE_EXCEEDED if `body` has not returned by `deadline`: nothing
// can stop it, so its thread is left behind with all that `body` owns. `body` must refer to nothing
// that may end before it does. The message is for a peer that accepts a connection and never
// answers.
absl::Status RunUntil(SteadyTime deadline, absl::string_view what,
                      std::function<absl::Status()> body);

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_DEADLINE_H_
