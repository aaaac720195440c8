// The server's side of TLS, with OpenSSL.
#ifndef TANDEM_COMMON_RPC_SECURITY_TLS_H_
#define TANDEM_COMMON_RPC_SECURITY_TLS_H_

#include <openssl/types.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/files/file_stamps.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

enum class TlsProtocol { kHttp2, kHttp1 };

// The certificate and the certificate authorities of a server. Connections that are made after
// Refresh has read new files use the new ones; those that exist go on, and CheckClient tells
// whether they may. Thread-safe, but for
// Refresh, which one thread calls.
class ServerTls {
 public:
  // INVALID_ARGUMENT naming the setting whose file cannot be read, does not fit, or has expired.
  static absl::StatusOr<std::unique_ptr<ServerTls>> Load(const config::v1::TlsOptions& options);
  ~ServerTls();

  // The server's end of a connection, without a socket; null when there is no memory. A client that
  // names protocols (ALPN) must name `protocol`.
  std::unique_ptr<SSL, void (*)(SSL*)> NewConnection(TlsProtocol protocol) const;

  // Reads the files again if they changed. Returns whether it did. An error leaves everything as it
  // was.
  absl::StatusOr<bool> Refresh();

  // UNAUTHENTICATED if the certificate that a client showed when it connected would be refused now:
  // it has expired, or its authority is not in the files any more.
  absl::Status CheckClient(const SSL& connection) const;

  // When the certificate expires.
  absl::Time expiry() const;

 private:
  struct Identity;

  explicit ServerTls(const config::v1::TlsOptions& options);
  static absl::StatusOr<std::shared_ptr<const Identity>> ReadIdentity(
      const config::v1::TlsOptions& options);
  std::shared_ptr<const Identity> identity() const;

  const config::v1::TlsOptions options_;
  FileStamps stamps_;
  std::atomic<std::shared_ptr<const Identity>> identity_;
};

// INVALID_ARGUMENT naming server.tls.ca_file unless the file holds certificates.
absl::Status CheckAuthorities(const std::string& ca_file);

// The protocol that NewConnection was asked for.
TlsProtocol ProtocolOf(const SSL& connection);

// The first of the errors that OpenSSL has queued in this thread, which empties the queue; "" if
// there is none.
std::string TakeTlsErrors();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SECURITY_TLS_H_
