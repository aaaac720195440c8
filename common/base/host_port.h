// Addresses in requests and configurations.
#ifndef TANDEM_COMMON_BASE_HOST_PORT_H_
#define TANDEM_COMMON_BASE_HOST_PORT_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

// OK for host:port with a port in [1, 65535], an IPv6 address in brackets; else INVALID_ARGUMENT
// with the field's path.
absl::Status CheckHostPort(absl::string_view path, absl::string_view address);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_HOST_PORT_H_
