#include "common/rpc/client/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/client_interceptor.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/logging.h"
#include "common/base/machine/host_port.h"
#include "common/base/steady_time.h"
#include "common/rpc/grpc_time.h"
#include "common/rpc/message_size.h"
#include "common/rpc/request_id.h"
#include "common/rpc/security/access_control.h"

namespace tandem::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;

// How often gRPC looks whether certificates have changed.
constexpr unsigned kRefreshSeconds = 1;

// Adds the token to the metadata of a call. (gRPC's own call credentials refuse plain channels.)
class TokenInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit TokenInterceptor(OwnToken& token) : token_(token) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      const std::string token = token_.Get();
      if (!token.empty()) {
        methods->GetSendInitialMetadata()->emplace(kAuthorizationKey,
                                                   absl::StrCat("Bearer ", token));
      }
    }
    methods->Proceed();
  }

 private:
  OwnToken& token_;
};

class TokenInterceptorFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenInterceptorFactory(std::shared_ptr<OwnToken> token) : token_(std::move(token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenInterceptor(*token_);
  }

 private:
  const std::shared_ptr<OwnToken> token_;
};

// Null without TLS.
std::shared_ptr<grpc::ChannelCredentials> MakeTlsCredentials(const config::v1::TlsOptions& tls,
                                                             PeerIdentity peer) {
  namespace grpc_tls = grpc::experimental;
  using Provider = grpc_tls::FileWatcherCertificateProvider;
  const bool has_certificate = !tls.certificate_file().empty();
  const bool verified = peer == PeerIdentity::kVerified;
  if (verified ? tls.ca_file().empty() : !has_certificate) return nullptr;
  grpc_tls::TlsChannelCredentialsOptions options;
  if (!has_certificate) {
    options.set_certificate_provider(std::make_shared<Provider>(tls.ca_file(), kRefreshSeconds));
  } else if (verified) {
    options.set_certificate_provider(std::make_shared<Provider>(
        tls.private_key_file(), tls.certificate_file(), tls.ca_file(), kRefreshSeconds));
  } else {
    options.set_certificate_provider(std::make_shared<Provider>(
        tls.private_key_file(), tls.certificate_file(), kRefreshSeconds));
  }
  if (has_certificate) options.watch_identity_key_cert_pairs();
  if (verified) {
    options.watch_root_certs();
  } else {
    options.set_verify_server_certs(false);
    options.set_check_call_host(false);
    options.set_certificate_verifier(std::make_shared<grpc_tls::NoOpCertificateVerifier>());
  }
  return grpc_tls::TlsCredentials(options);
}

// Whether the token may go to `address`.
bool MaySendToken(const std::string& address, const ChannelOptions& options) {
  if (options.tls != nullptr || options.insecure || IsLoopbackHost(HostOfAddress(address))) {
    return true;
  }
  Log(LogLevel::kError, "token_not_sent",
      {{"address", address},
       {"message", "the token would be sent unencrypted: set server.tls.ca_file"}});
  return false;
}

}  // namespace

std::string OwnToken::Get() {
  std::lock_guard lock(mutex_);
  if (!token_.has_value() || stamps_.Changed()) {
    const auto read = ReadFirstToken("server.tokens.own_file", path_);
    if (read.ok()) {
      token_ = *read;
    } else {
      Log(LogLevel::kError, "token_not_read", {{"message", read.status().message()}});
    }
  }
  return token_.value_or("");
}

ChannelOptions ToChannelOptions(const config::v1::ServerOptions& options, PeerIdentity peer) {
  ChannelOptions channel{.keepalive = absl::Seconds(options.keepalive_seconds()),
                         .keepalive_timeout = absl::Seconds(options.keepalive_timeout_seconds()),
                         .insecure = options.insecure()};
  if (!options.tokens().own_file().empty()) {
    channel.token = std::make_shared<OwnToken>(options.tokens().own_file());
  }
  channel.tls = MakeTlsCredentials(options.tls(), peer);
  return channel;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.keepalive)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_timeout)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A proxy of the environment is for the internet: it does not reach other servers.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (options.token != nullptr && MaySendToken(address, options)) {
    interceptors.push_back(std::make_unique<TokenInterceptorFactory>(options.token));
  }
  return grpc::experimental::CreateCustomChannelWithInterceptors(
      address, options.tls != nullptr ? options.tls : grpc::InsecureChannelCredentials(), arguments,
      std::move(interceptors));
}

std::unique_ptr<grpc::ClientContext> MakeClientContext(SteadyTime deadline,
                                                       const std::string& request_id,
                                                       const std::string& traceparent) {
  auto context = std::make_unique<grpc::ClientContext>();
  if (deadline != SteadyTime::InfiniteFuture()) context->set_deadline(ToGrpcTime(deadline));
  if (!request_id.empty()) context->AddMetadata(kRequestIdKey, request_id);
  if (!traceparent.empty()) context->AddMetadata(kTraceparentKey, traceparent);
  return context;
}

}  // namespace tandem::rpc
