#include "common/rpc/server/address.h"

#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tandem::rpc {
namespace {

bool IsEveryInterface(const std::string& host) {
  return host == "0.0.0.0" || host == "::" || host == "[::]";
}

std::string MachineName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

}  // namespace

std::string JoinHostPort(const std::string& host, int port) {
  const bool bare_ipv6 = absl::StrContains(host, ':') && !absl::StartsWith(host, "[");
  return bare_ipv6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

std::string AdvertisedAddress(const config::v1::ServerOptions& options, int grpc_port) {
  if (!options.advertised_address().empty()) return options.advertised_address();
  return JoinHostPort(IsEveryInterface(options.host()) ? MachineName() : options.host(), grpc_port);
}

std::string LocalAddress(const config::v1::ServerOptions& options) {
  return JoinHostPort(IsEveryInterface(options.host()) ? "localhost" : options.host(),
                      options.grpc_port());
}

}  // namespace tandem::rpc
