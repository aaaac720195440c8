// The TLS and the tokens of a server.
#ifndef TANDEM_COMMON_RPC_SECURITY_SERVER_SECURITY_H_
#define TANDEM_COMMON_RPC_SECURITY_SERVER_SECURITY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/base/files/paths/path_roots.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/security/access_control.h"
#include "common/rpc/security/tls.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

class ServerSecurity {
 public:
  // Plain bytes, without tokens. `metrics` must outlive the object.
  explicit ServerSecurity(Metrics& metrics);
  // `options` must be resolved. INVALID_ARGUMENT naming the setting whose file is not good.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Load(
      const config::v1::ServerOptions& options, Metrics& metrics);

  const ServerTls* tls() const { return tls_.get(); }  // null: plain bytes
  const AccessControl& access() const { return *access_; }

  // Reads files again that have changed, and logs the result. Returns whether one did: what was
  // withdrawn by that ends with Server::EndWithdrawn. Called now and then, by one thread.
  bool Refresh();

 private:
  void ShowExpiry();

  Metrics& metrics_;
  std::unique_ptr<ServerTls> tls_;
  std::unique_ptr<AccessControl> access_;
};

// The directories in which clients may name paths: server.path_roots, or, where it is empty, any on
// a loopback address and none on another.
PathRoots PathRootsOf(const config::v1::ServerOptions& options);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SECURITY_SERVER_SECURITY_H_
