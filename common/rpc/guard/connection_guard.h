// Accepts a server's connections and bounds what their clients can make gRPC hold. gRPC 1.51 has no
// bound on connections, on streams that are opened and reset, nor on messages that never end, so
// every byte passes through here on its way to gRPC, which gets one end of a socket pair for each
// connection. TLS ends here, too: a client without a good certificate never reaches gRPC.
// docs/adr/0028-a-guard-before-grpc.md says what else was considered.
#ifndef TANDEM_COMMON_RPC_GUARD_CONNECTION_GUARD_H_
#define TANDEM_COMMON_RPC_GUARD_CONNECTION_GUARD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/security/tls.h"

namespace tandem::rpc {

struct ConnectionLimits {
  // A connection too many replaces one of the address that has most: the one that has been without
  // a call for longest, else the newest. If no address has two more than the new connection's own,
  // only a connection without a call is replaced, of that address or of one that has more;
  // otherwise the new one is refused.
  int max_connections = 128;
  // Connections and calls that clients of one address may give up at once: each connection that it
  // opens, and each call that is open when it closes one. Half of that again every second; more are
  // refused.
  int64_t max_churn = 512;
  // Streams that one connection may have open: twice the calls that it is told (server.h), since a
  // client may send before it has read that. One too many closes the connection.
  int64_t max_connection_streams = 256;
  // Streams that are open, of all connections. One too many closes the connection with most.
  int64_t max_open_streams = 4096;
  // Bytes of messages that are not complete, of all connections. One too many closes the
  // connection that holds most.
  int64_t max_unfinished_bytes = 256 << 20;
  // Streams that a client may reset on one connection at once; a tenth of that again every second.
  // One too many closes the connection.
  int64_t max_resets = 256;
  // PING and SETTINGS frames that a client may send on one connection at once; a tenth of that
  // again every second. One too many closes the connection.
  int64_t max_control_frames = 256;
  // Resets of all connections in a second. A connection that goes beyond waits.
  int64_t max_resets_per_second = 1000;
};

class ConnectionGuard {
 public:
  // Binds; port 0 means any. Clients have to speak TLS if `tls` is not null. `metrics` and `tls`
  // must outlive this object. UNAVAILABLE when the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<ConnectionGuard>> Listen(
      const std::string& host, int port, Metrics& metrics, const ServerTls* tls = nullptr,
      const ConnectionLimits& limits = {});
  // Waits a moment for answers that are on their way to clients, once gRPC has closed its ends.
  ~ConnectionGuard();

  int port() const;

  // Accepts connections from now on. `serve` gets a connected, non-blocking socket for each, which
  // it owns; it is called on the guard's thread.
  void Start(std::function<void(int fd)> serve);

  // Closes the connections whose clients' certificates would be refused now. Returns at once.
  void EndWithdrawn();

  // Closes the listening sockets.
  void StopListening();

 private:
  class Relay;

  explicit ConnectionGuard(std::unique_ptr<Relay> relay);

  const std::unique_ptr<Relay> relay_;
};

// "ADDRESS" or "ADDRESS(COMMON NAME)" of a client, from what gRPC calls the peer of a call; "" if
// the name is not a guard's. Characters that a URI cannot hold are percent-encoded.
std::string PeerName(const std::string& grpc_peer);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GUARD_CONNECTION_GUARD_H_
