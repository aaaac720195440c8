// Addresses of servers, as host:port.
#ifndef TANDEM_COMMON_RPC_SERVER_ADDRESS_H_
#define TANDEM_COMMON_RPC_SERVER_ADDRESS_H_

#include <string>

#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

// "host:port"; a bare IPv6 address gets its brackets.
std::string JoinHostPort(const std::string& host, int port);

// Where the other servers of the cluster reach a server whose gRPC port is `grpc_port`:
// server.advertised_address, or else what was bound, the machine's name standing for every
// interface.
std::string AdvertisedAddress(const config::v1::ServerOptions& options, int grpc_port);

// Where a process on the same machine reaches it.
std::string LocalAddress(const config::v1::ServerOptions& options);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_ADDRESS_H_
