#include "common/base/host_port.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace tandem {

absl::Status CheckHostPort(absl::string_view path, absl::string_view address) {
  const size_t colon = address.rfind(':');
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  int port = 0;
  if (colon == absl::string_view::npos || host.empty() ||
      (absl::StrContains(host, ':') && !bracketed) ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return InvalidField(path, absl::StrCat("must be host:port, got \"", address, "\""));
  }
  return absl::OkStatus();
}

}  // namespace tandem
