// Which of this machine's addresses a peer sees.
#ifndef TANDEM_COMMON_PARALLEL_LOCAL_ADDRESS_H_
#define TANDEM_COMMON_PARALLEL_LOCAL_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tandem::parallel {

// The numeric address from which this machine reaches host:port; loopback for "localhost". Tries
// to connect until somebody listens there; UNAVAILABLE with the system's words if nobody does by
// `deadline`.
absl::StatusOr<std::string> LocalAddressToward(const std::string& host, int port,
                                               absl::Time deadline);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_LOCAL_ADDRESS_H_
