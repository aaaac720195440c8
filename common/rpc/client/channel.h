// Channels to other Tandem servers.
#ifndef TANDEM_COMMON_RPC_CLIENT_CHANNEL_H_
#define TANDEM_COMMON_RPC_CLIENT_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/files/file_stamps.h"
#include "common/base/steady_time.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

// The token that a server shows to others: the first of a file, which is read again when it
// changes. Thread-safe.
class OwnToken {
 public:
  explicit OwnToken(std::string path) : path_(std::move(path)), stamps_({path_}) {}
  // The token; "" if the file has had none yet.
  std::string Get();

 private:
  const std::string path_;
  std::mutex mutex_;
  FileStamps stamps_;
  std::optional<std::string> token_;
};

struct ChannelOptions {
  absl::Duration keepalive;
  absl::Duration keepalive_timeout;
  std::shared_ptr<grpc::ChannelCredentials> tls = nullptr;  // null: plain bytes
  std::shared_ptr<OwnToken> token = nullptr;                // null: none
  bool insecure = false;  // the token may travel without TLS to other machines, too
};

// The identity that a channel expects of its server.
enum class PeerIdentity {
  kVerified,    // a server whose certificate has its name, signed by server.tls.ca_file
  kOwnAddress,  // the server itself: any certificate
};

// For the calls of a server to others. Certificates and token are read again when they change.
ChannelOptions ToChannelOptions(const config::v1::ServerOptions& options,
                                PeerIdentity peer = PeerIdentity::kVerified);

// A channel to `address` (host:port) with keepalive, a 4 MiB receive limit and gRPC's own retries
// off (they would execute a step twice). A token that would leave this machine in the clear is not
// sent, which is logged.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelOptions& options);

// A context with the deadline, the request id and the trace context ("" for none).
std::unique_ptr<grpc::ClientContext> MakeClientContext(SteadyTime deadline,
                                                       const std::string& request_id = "",
                                                       const std::string& traceparent = "");

// The context of a call that is made for another one, and is cancelled with it: its names, and the
// earlier of its deadline and `timeout` from now.
class CallContext {
 public:
  CallContext(const CallScope& call, absl::Duration timeout)
      : context_(MakeClientContext(std::min(call.deadline, SteadyTime::Now() + timeout),
                                   call.request_id, call.traceparent)),
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

#endif  // TANDEM_COMMON_RPC_CLIENT_CHANNEL_H_
