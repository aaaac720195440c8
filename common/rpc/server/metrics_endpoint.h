// Serves a server's metrics to Prometheus over HTTP, or HTTPS.
#ifndef TANDEM_COMMON_RPC_SERVER_METRICS_ENDPOINT_H_
#define TANDEM_COMMON_RPC_SERVER_METRICS_ENDPOINT_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/security/server_security.h"

namespace httplib {
class Server;
}

namespace tandem::rpc {

// Answers GET /metrics: where the server has tokens, to bearers of any of them. A connection has
// one request of a few kilobytes, and few seconds for all of it, the TLS handshake included.
class MetricsEndpoint {
 public:
  // Port 0 means any. `security` and `metrics` must outlive the endpoint. UNAVAILABLE when the
  // address cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Listen(const std::string& host, int port,
                                                                 const ServerSecurity& security,
                                                                 Metrics& metrics);
  ~MetricsEndpoint();

  int port() const { return port_; }

 private:
  MetricsEndpoint(std::unique_ptr<httplib::Server> server, int port);

  const std::unique_ptr<httplib::Server> server_;
  const int port_;
  std::thread thread_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_METRICS_ENDPOINT_H_
