// The server info that all servers have in common.
#ifndef TANDEM_COMMON_RPC_SERVER_SERVER_INFO_H_
#define TANDEM_COMMON_RPC_SERVER_SERVER_INFO_H_

#include <string>

#include "common/rpc/server/server_main.h"
#include "tandem/types/v1/server.pb.h"

namespace tandem::rpc {

// Role, software version, uptime and advertised address; the rest is the service's.
types::v1::ServerInfo DescribeServer(const ServerRuntime& runtime, const std::string& role);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_SERVER_INFO_H_
