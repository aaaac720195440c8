// The address under which a peer sees this machine.
#ifndef TANDEM_COMMON_RANKS_TRANSPORT_LOCAL_ADDRESS_H_
#define TANDEM_COMMON_RANKS_TRANSPORT_LOCAL_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {

// Returns the numeric address from which this machine reaches host:port; loopback for "localhost".
// Tries to connect until a process listens there. UNAVAILABLE, with the system's message, if none
// does by `deadline`.
absl::StatusOr<std::string> LocalAddressToward(const std::string& host, int port,
                                               SteadyTime deadline);

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TRANSPORT_LOCAL_ADDRESS_H_
