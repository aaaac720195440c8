#include "common/rpc/security/access_control.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/config/server_config.h"

namespace tandem::rpc {
namespace {

// 16 random characters cannot be guessed over a network.
constexpr size_t kMinTokenLength = 16;
constexpr size_t kMaxTokenLength = 4096;
constexpr size_t kMaxTokenFileBytes = 1 << 20;

std::array<uint8_t, 32> Sha256(absl::string_view text) {
  std::array<uint8_t, 32> hash;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash.data());
  return hash;
}

// The tokens of a file, one on each line that is not blank. Errors do not quote them.
absl::StatusOr<std::vector<std::string>> ReadTokenFile(absl::string_view setting,
                                                       const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxTokenFileBytes);
  if (!text.ok()) {
    return InvalidField(setting, absl::StrCat(path, ": cannot be read: ", text.status().message()));
  }
  std::vector<std::string> tokens;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    ++number;
    const absl::string_view token = absl::StripAsciiWhitespace(line);
    if (token.empty()) continue;
    if (token.size() < kMinTokenLength || token.size() > kMaxTokenLength ||
        !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
      return InvalidField(
          setting, absl::StrCat(path, ": line ", number, " is not a token: ", kMinTokenLength,
                                " to ", kMaxTokenLength, " visible ASCII characters"));
    }
    tokens.emplace_back(token);
  }
  if (tokens.empty()) return InvalidField(setting, absl::StrCat(path, ": holds no token"));
  return tokens;
}

// "admin" of ROLE_ADMIN.
std::string NameOf(Role role) {
  return absl::AsciiStrToLower(absl::StripPrefix(types::v1::Role_Name(role), "ROLE_"));
}

}  // namespace

absl::StatusOr<std::string> ReadFirstToken(absl::string_view setting, const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(std::vector<std::string> tokens, ReadTokenFile(setting, path));
  return std::move(tokens.front());
}

absl::StatusOr<std::shared_ptr<const AccessControl::Tokens>> AccessControl::ReadTokens(
    const config::v1::TokenOptions& options) {
  auto tokens = std::make_shared<Tokens>();
  for (const auto& [setting, path, role] :
       {std::tuple{"server.tokens.reader_file", &options.reader_file(), Role::ROLE_READER},
        std::tuple{"server.tokens.user_file", &options.user_file(), Role::ROLE_USER},
        std::tuple{"server.tokens.admin_file", &options.admin_file(), Role::ROLE_ADMIN}}) {
    if (path->empty()) continue;
    TANDEM_ASSIGN_OR_RETURN(const std::vector<std::string> lines, ReadTokenFile(setting, *path));
    for (const std::string& line : lines) tokens->push_back({Sha256(line), role});
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Load(
    const config::v1::TokenOptions& options, Metrics& metrics) {
  auto access = std::make_unique<AccessControl>(metrics);
  if (!config::HasTokens(options)) return access;
  access->options_ = options;
  access->stamps_ = FileStamps({options.reader_file(), options.user_file(), options.admin_file()});
  TANDEM_ASSIGN_OR_RETURN(access->tokens_, ReadTokens(options));
  return access;
}

Role AccessControl::RoleOf(absl::string_view token) const {
  const std::array<uint8_t, 32> hash = Sha256(token);
  const std::shared_ptr<const Tokens> tokens = tokens_;
  Role role = Role::ROLE_UNSPECIFIED;
  for (const Token& known : *tokens) {
    if (CRYPTO_memcmp(known.sha256.data(), hash.data(), hash.size()) == 0) {
      role = std::max(role, known.role);
    }
  }
  return role;
}

absl::Status AccessControl::Check(absl::string_view authorization, Role needed) const {
  if (!required()) return absl::OkStatus();
  const auto deny = [&](const char* counted, absl::Status status, const ErrorReason& reason) {
    metrics_.Counter(metric::kAuthDenials, {counted}).Increment();
    return WithReason(std::move(status), reason);
  };
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) {
    return deny("token_missing",
                absl::UnauthenticatedError("the call needs a token: authorization: Bearer TOKEN"),
                reason::kTokenMissing);
  }
  const Role role = RoleOf(absl::StripAsciiWhitespace(authorization.substr(kScheme.size())));
  if (role == Role::ROLE_UNSPECIFIED) {
    return deny("token_unknown", absl::UnauthenticatedError("this server does not know the token"),
                reason::kTokenUnknown);
  }
  if (role < needed) {
    return deny(
        "insufficient_role",
        absl::PermissionDeniedError(absl::StrCat("the method needs the role ", NameOf(needed),
                                                 ", but the token has ", NameOf(role))),
        reason::kInsufficientRole);
  }
  return absl::OkStatus();
}

absl::Status AccessControl::Check(const grpc::ServerContextBase& context, Role needed) const {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kAuthorizationKey);
  return Check(found == metadata.end()
                   ? absl::string_view()
                   : absl::string_view(found->second.data(), found->second.size()),
               needed);
}

absl::StatusOr<bool> AccessControl::Refresh() {
  if (!required() || !stamps_.Changed()) return false;
  TANDEM_ASSIGN_OR_RETURN(tokens_, ReadTokens(options_));
  return true;
}

Role RequiredRole(const google::protobuf::Descriptor& request) {
  const google::protobuf::FileDescriptor& file = *request.file();
  if (absl::StartsWith(file.package(), "grpc.reflection.")) return Role::ROLE_READER;
  for (int i = 0; i < file.service_count(); ++i) {
    const google::protobuf::ServiceDescriptor& service = *file.service(i);
    for (int j = 0; j < service.method_count(); ++j) {
      if (service.method(j)->input_type() != &request) continue;
      const Role role = service.method(j)->options().GetExtension(types::v1::required_role);
      return role == Role::ROLE_UNSPECIFIED ? Role::ROLE_ADMIN : role;
    }
  }
  return Role::ROLE_ADMIN;
}

}  // namespace tandem::rpc
