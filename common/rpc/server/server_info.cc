#include "common/rpc/server/server_info.h"

namespace tandem::rpc {

types::v1::ServerInfo DescribeServer(const ServerRuntime& runtime, const std::string& role) {
  types::v1::ServerInfo info;
  info.set_role(role);
  info.set_software_version(SoftwareVersion());
  info.set_uptime_seconds(absl::ToDoubleSeconds(SteadyTime::Now() - runtime.start_time));
  info.set_advertised_address(runtime.advertised_address);
  return info;
}

}  // namespace tandem::rpc
