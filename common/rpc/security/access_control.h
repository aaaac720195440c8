// Bearer tokens and the roles that they stand for.
#ifndef TANDEM_COMMON_RPC_SECURITY_ACCESS_CONTROL_H_
#define TANDEM_COMMON_RPC_SECURITY_ACCESS_CONTROL_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/files/file_stamps.h"
#include "common/rpc/metrics/metrics.h"
#include "tandem/config/v1/server_config.pb.h"
#include "tandem/types/v1/access.pb.h"

namespace tandem::rpc {

using types::v1::Role;

// Metadata key, and HTTP header, of a caller's token: "Bearer TOKEN".
inline constexpr char kAuthorizationKey[] = "authorization";

// The tokens of a server. Thread-safe, but for Refresh, which one thread calls.
class AccessControl {
 public:
  // Without a token: everybody may do everything.
  explicit AccessControl(Metrics& metrics) : metrics_(metrics) {}
  // INVALID_ARGUMENT naming the setting whose file cannot be read or has no good token. `metrics`
  // must outlive this object.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Load(
      const config::v1::TokenOptions& options, Metrics& metrics);

  // Whether callers need a token.
  bool required() const { return tokens_.load() != nullptr; }

  // UNAUTHENTICATED without a token of this server, PERMISSION_DENIED if its role may not do what
  // needs the role `needed`; counted in tandem_auth_denials_total. `authorization` is the value of
  // the header, "" if there is none.
  absl::Status Check(absl::string_view authorization, Role needed) const;
  absl::Status Check(const grpc::ServerContextBase& context, Role needed) const;

  // As ServerTls::Refresh.
  absl::StatusOr<bool> Refresh();

 private:
  // Hashes are compared, so that the time tells nothing of a token, not even its length.
  struct Token {
    std::array<uint8_t, 32> sha256;
    Role role;
  };
  using Tokens = std::vector<Token>;

  static absl::StatusOr<std::shared_ptr<const Tokens>> ReadTokens(
      const config::v1::TokenOptions& options);
  Role RoleOf(absl::string_view token) const;

  Metrics& metrics_;
  config::v1::TokenOptions options_;
  FileStamps stamps_{{}};
  std::atomic<std::shared_ptr<const Tokens>> tokens_;
};

// The first token of a file. INVALID_ARGUMENT naming `setting` if the file cannot be read or has no
// good token.
absl::StatusOr<std::string> ReadFirstToken(absl::string_view setting, const std::string& path);

// The role that a method asks for (proto/tandem/types/v1/access.proto), found by the method's
// request. Admin if the method does not say; reader for reflection, which is not ours to mark.
Role RequiredRole(const google::protobuf::Descriptor& request);

template <typename Request>
Role RoleFor() {
  static const Role role = RequiredRole(*Request::descriptor());
  return role;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SECURITY_ACCESS_CONTROL_H_
