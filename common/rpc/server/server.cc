#include "common/rpc/server/server.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/steady_time.h"
#include "common/rpc/grpc_time.h"
#include "common/rpc/message_size.h"
#include "common/rpc/server/address.h"
#include "common/rpc/server/rpc_interceptor.h"
#include "grpc/health/v1/health.pb.h"

namespace tandem::rpc {
namespace {

// How long open health watches may hold up a shutdown once the real calls are gone.
constexpr absl::Duration kWatchersGrace = absl::Milliseconds(200);

// Half of the shortest keepalive interval that a configuration may ask of a client: a client with
// another interval than ours is not sent away.
constexpr int kToleratedPingMilliseconds = 500;

// Time in which a new connection must send its HTTP/2 settings.
constexpr absl::Duration kHandshakeTimeout = absl::Seconds(10);

// The service that grpc++ adds.
constexpr char kHealthService[] = "grpc.health.v1.Health";

int Milliseconds(double seconds) { return static_cast<int>(seconds * 1000); }

absl::Status CannotBind(const std::string& what, const std::string& address,
                        const std::string& field) {
  return absl::UnavailableError(absl::StrCat("cannot bind the ", what, " address ", address,
                                             ": is the port in use? (", field,
                                             ", 0 picks a free one)"));
}

void AddMethods(const google::protobuf::ServiceDescriptor* service, MethodTable& methods) {
  for (int i = 0; service != nullptr && i < service->method_count(); ++i) {
    const google::protobuf::MethodDescriptor* const method = service->method(i);
    methods[absl::StrCat("/", service->full_name(), "/", method->name())] =
        method->input_type()->full_name();
  }
}

// The methods of `services`, of health and of reflection. Naming the description of health makes it
// part of the program, where reflection finds it.
MethodTable MethodsOf(const std::vector<NamedService>& services) {
  const google::protobuf::DescriptorPool* const pool =
      google::protobuf::DescriptorPool::generated_pool();
  MethodTable methods;
  for (const NamedService& service : services) {
    AddMethods(pool->FindServiceByName(service.name), methods);
  }
  AddMethods(
      grpc::health::v1::HealthCheckRequest::descriptor()->file()->FindServiceByName("Health"),
      methods);
  for (const std::string& name : ReflectionService::Names()) {
    AddMethods(pool->FindServiceByName(name), methods);
  }
  return methods;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const config::v1::ServerOptions& options,
                                                      const std::vector<NamedService>& services,
                                                      CallExecutor& executor,
                                                      const ServerSecurity& security,
                                                      Metrics* metrics) {
  static const bool health = [] {
    grpc::EnableDefaultHealthCheckService(true);
    return true;
  }();
  (void)health;

  std::unique_ptr<Server> server(new Server);
  auto metrics_endpoint =
      MetricsEndpoint::Listen(options.host(), options.metrics_port(), security, *metrics);
  if (!metrics_endpoint.ok()) {
    return CannotBind("metrics", JoinHostPort(options.host(), options.metrics_port()),
                      "server.metrics_port");
  }
  server->metrics_endpoint_ = *std::move(metrics_endpoint);

  const std::string address = JoinHostPort(options.host(), options.grpc_port());
  auto guard =
      ConnectionGuard::Listen(options.host(), options.grpc_port(), *metrics, security.tls());
  if (!guard.ok()) return CannotBind("gRPC", address, "server.grpc_port");
  server->guard_ = *std::move(guard);

  grpc::ServerBuilder builder;
  using External = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(External::FROM_FD,
                                                           grpc::InsecureServerCredentials());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(kHandshakeTimeout)));
  // gRPC holds 64 KiB of a stream that is not read, however fast they come.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // A compressed message is inflated before its size is checked, so it is refused unread.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(options.keepalive_seconds()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             Milliseconds(options.keepalive_timeout_seconds()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kToleratedPingMilliseconds);
  builder.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  for (const NamedService& service : services) {
    builder.RegisterService(service.service);
    server->names_.push_back(service.name);
  }
  std::vector<std::string> listed = server->names_;
  listed.emplace_back(kHealthService);
  server->reflection_ = std::make_unique<ReflectionService>(executor, std::move(listed));
  for (grpc::Service* service : server->reflection_->services()) builder.RegisterService(service);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(MakeRpcInterceptor(MethodsOf(services), metrics, &server->live_calls_));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server->metrics_ = metrics;
  server->executor_ = &executor;
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) return absl::InternalError("gRPC cannot start a server");
  server->SetServing(false);
  if (auto* const health_service = server->server_->GetHealthCheckService()) {
    health_service->SetServingStatus(kLivenessService, true);
  }
  server->guard_->Start([acceptor](int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = fd;
    acceptor->HandleNewConnection(&connection);
  });
  return server;
}

Server::~Server() { Shutdown(SteadyTime::InfinitePast()); }

void Server::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* const health = server_->GetHealthCheckService();
  if (health != nullptr) {
    for (const std::string& name : names_) health->SetServingStatus(name, serving);
    health->SetServingStatus("", serving);
  }
  metrics_->Gauge(metric::kServerReady).Set(serving ? 1 : 0);
}

void Server::EndWithdrawn() {
  executor_->streams().EndWithdrawn();
  guard_->EndWithdrawn();
}

void Server::Shutdown(SteadyTime deadline) {
  if (server_ == nullptr || shut_down_) return;
  shut_down_ = true;
  SetServing(false);
  while (live_calls() > 0 && SteadyTime::Now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  guard_->StopListening();
  server_->Shutdown(ToGrpcTime(SteadyTime::Now() + kWatchersGrace));
  server_->Wait();
}

}  // namespace tandem::rpc
