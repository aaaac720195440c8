// Channels to other Tandem servers.
#ifndef TANDEM_COMMON_RPC_CHANNEL_H_
#define TANDEM_COMMON_RPC_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"

namespace tandem::rpc {

struct ChannelOptions {
  absl::Duration keepalive;
  absl::Duration keepalive_timeout;
};

// A channel to `address` (host:port) with keepalive, a 4 MiB receive limit and gRPC's own retries
// off (they would execute a step twice). TLS is not supported yet.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelOptions& options);

// A context with the deadline and the request id ("" for none).
std::unique_ptr<grpc::ClientContext> MakeClientContext(absl::Time deadline,
                                                       const std::string& request_id = "");

// The context of a call that is made for another one, and is cancelled with it: its request id, and
// the earlier of its deadline and `timeout` from now.
class CallContext {
 public:
  CallContext(const CallScope& call, absl::Duration timeout)
      : context_(
            MakeClientContext(std::min(call.deadline, absl::Now() + timeout), call.request_id)),
        cancel_(call.cancellation, Cancel{context_.get()}) {}

  grpc::ClientContext* get() { return context_.get(); }

 private:
  struct Cancel {
    grpc::ClientContext* context;
    void operator()() const { context->TryCancel(); }
  };

  const std::unique_ptr<grpc::ClientContext> context_;
  const std::stop_callback<Cancel> cancel_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CHANNEL_H_
