#include "common/rpc/security/server_security.h"

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/machine/host_port.h"

namespace tandem::rpc {
namespace {

// Returns whether the files were read again.
bool LogRefresh(const char* files, const absl::StatusOr<bool>& refreshed) {
  if (!refreshed.ok()) {
    Log(LogLevel::kError, "credentials_not_reloaded",
        {{"files", files},
         {"message", refreshed.status().message()},
         {"remedy", "the earlier ones are kept"}});
  } else if (*refreshed) {
    Log(LogLevel::kInfo, "credentials_reloaded", {{"files", files}});
  }
  return refreshed.ok() && *refreshed;
}

}  // namespace

ServerSecurity::ServerSecurity(Metrics& metrics)
    : metrics_(metrics), access_(std::make_unique<AccessControl>(metrics)) {
  // The counters exist from the start, for alerts.
  for (const char* reason :
       {"not_tls", "certificate_missing", "certificate_refused", "handshake_failed",
        "token_missing", "token_unknown", "insufficient_role"}) {
    metrics.Counter(metric::kAuthDenials, {reason});
  }
}

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Load(
    const config::v1::ServerOptions& options, Metrics& metrics) {
  auto security = std::make_unique<ServerSecurity>(metrics);
  if (!options.tls().certificate_file().empty()) {
    TANDEM_ASSIGN_OR_RETURN(security->tls_, ServerTls::Load(options.tls()));
    security->ShowExpiry();
  } else if (!options.tls().ca_file().empty()) {
    TANDEM_RETURN_IF_ERROR(CheckAuthorities(options.tls().ca_file()));
  }
  TANDEM_ASSIGN_OR_RETURN(security->access_, AccessControl::Load(options.tokens(), metrics));
  if (const std::string& own = options.tokens().own_file(); !own.empty()) {
    TANDEM_RETURN_IF_ERROR(ReadFirstToken("server.tokens.own_file", own).status());
  }
  return security;
}

bool ServerSecurity::Refresh() {
  bool changed = false;
  if (tls_ != nullptr) {
    changed = LogRefresh("server.tls", tls_->Refresh());
    ShowExpiry();
  }
  return LogRefresh("server.tokens", access_->Refresh()) || changed;
}

void ServerSecurity::ShowExpiry() {
  metrics_.Gauge(metric::kCertificateExpiry)
      .Set(absl::ToDoubleSeconds(tls_->expiry() - absl::UnixEpoch()));
}

PathRoots PathRootsOf(const config::v1::ServerOptions& options) {
  if (options.path_roots().empty() && IsLoopbackHost(options.host())) return PathRoots();
  return PathRoots(
      std::vector<std::string>(options.path_roots().begin(), options.path_roots().end()));
}

}  // namespace tandem::rpc
