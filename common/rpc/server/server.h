// The gRPC server that all three mains share: health per service, reflection, keepalive, receive
// limit, metrics endpoint, call metrics, request ids.
#ifndef TANDEM_COMMON_RPC_SERVER_SERVER_H_
#define TANDEM_COMMON_RPC_SERVER_SERVER_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/server.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/guard/connection_guard.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/security/server_security.h"
#include "common/rpc/server/metrics_endpoint.h"
#include "common/rpc/server/reflection_service.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

// The name under which health tells whether the process can answer at all. Whoever restarts a
// server that does not answer asks for this one: a server that loads, or saves to a slow disk, is
// alive.
inline constexpr char kLivenessService[] = "liveness";

// Calls of one connection at a time; a client holds back the others.
inline constexpr int kMaxCallsPerConnection = 128;

struct NamedService {
  std::string name;  // "tandem.rollout.v1.RolloutService"
  grpc::Service* service;
};

class Server {
 public:
  // Binds both ports and answers from now on, with health NOT_SERVING for every name and for "",
  // and SERVING for kLivenessService. `options` must be resolved. The executor runs reflection. The
  // services, the executor, `security` and `metrics` must outlive the server. UNAVAILABLE names an
  // address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const config::v1::ServerOptions& options,
                                                       const std::vector<NamedService>& services,
                                                       CallExecutor& executor,
                                                       const ServerSecurity& security,
                                                       Metrics* metrics);
  ~Server();

  int grpc_port() const { return guard_->port(); }
  int metrics_port() const { return metrics_endpoint_->port(); }

  // Health of every service and of "": readiness. That of kLivenessService is SERVING as long as
  // the process answers, whatever it is doing.
  void SetServing(bool serving);

  // Ends the streams and closes the connections of clients whose token or certificate is not good
  // any more. Returns at once.
  void EndWithdrawn();

  // Calls in progress, health and reflection not counted.
  int64_t live_calls() const { return live_calls_; }

  // Turns health NOT_SERVING, waits for live calls until `deadline`, then cancels what is left.
  // Blocks. New calls still arrive while it waits: the executor's gate refuses them.
  void Shutdown(SteadyTime deadline);

 private:
  Server() = default;

  std::atomic<int64_t> live_calls_ = 0;
  std::vector<std::string> names_;
  CallExecutor* executor_ = nullptr;
  Metrics* metrics_ = nullptr;
  std::unique_ptr<MetricsEndpoint> metrics_endpoint_;
  std::unique_ptr<ConnectionGuard> guard_;
  std::unique_ptr<ReflectionService> reflection_;
  std::unique_ptr<grpc::Server> server_;
  bool shut_down_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_SERVER_H_
