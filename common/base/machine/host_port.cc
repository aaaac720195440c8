#include "common/base/machine/host_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

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

bool IsLoopbackHost(absl::string_view host) {
  in_addr ipv4{};
  if (inet_pton(AF_INET, std::string(host).c_str(), &ipv4) == 1) {
    return ntohl(ipv4.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return host == "localhost" || WithoutBrackets(host) == "::1";
}

absl::string_view WithoutBrackets(absl::string_view host) {
  const bool bracketed = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

absl::string_view HostOfAddress(absl::string_view address) {
  return WithoutBrackets(address.substr(0, address.rfind(':')));
}

}  // namespace tandem
