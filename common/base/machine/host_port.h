// Addresses in requests and configurations.
#ifndef TANDEM_COMMON_BASE_MACHINE_HOST_PORT_H_
#define TANDEM_COMMON_BASE_MACHINE_HOST_PORT_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

// OK for host:port with a port in [1, 65535], an IPv6 address in brackets; else INVALID_ARGUMENT
// with the field's path.
absl::Status CheckHostPort(absl::string_view path, absl::string_view address);

// Whether a host is a loopback address (127.0.0.0/8 or ::1, in brackets or not) or localhost. Any
// other name may resolve to another machine.
bool IsLoopbackHost(absl::string_view host);

// A host without the brackets that an IPv6 address may have.
absl::string_view WithoutBrackets(absl::string_view host);

// The host of host:port, without brackets.
absl::string_view HostOfAddress(absl::string_view address);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_HOST_PORT_H_
