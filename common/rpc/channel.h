// Channels to other Tandem servers.
#ifndef TANDEM_COMMON_RPC_CHANNEL_H_
#define TANDEM_COMMON_RPC_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>
#include <string>

#include "absl/time/time.h"

namespace tandem::rpc {

struct ChannelOptions {
  absl::Duration keepalive = absl::Seconds(30);
  absl::Duration keepalive_timeout = absl::Seconds(20);
};

// A channel to `address` (host:port) with keepalive, a 4 MiB receive limit and gRPC's own retries
// off (they would execute a step twice). Without TLS for now.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelOptions& options = {});

// A context with the deadline and the request id ("" for none).
std::unique_ptr<grpc::ClientContext> MakeClientContext(absl::Time deadline,
                                                       const std::string& request_id = "");

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CHANNEL_H_
