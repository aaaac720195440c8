#include "common/rpc/security/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"

namespace tandem::rpc {
namespace {

constexpr int64_t kMaxPemBytes = 1 << 20;

using ContextPointer = std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)>;

// Names of protocols as ALPN (RFC 7301) writes them, each behind its length.
constexpr absl::string_view kHttp2 = "\x02h2";
constexpr absl::string_view kHttp1 = "\x08http/1.1";

int ChooseProtocol(SSL* connection, const unsigned char** chosen, unsigned char* chosen_size,
                   const unsigned char* offered, unsigned int offered_size, void*) {
  const absl::string_view spoken = ProtocolOf(*connection) == TlsProtocol::kHttp2 ? kHttp2 : kHttp1;
  unsigned char* found = nullptr;
  const int result = SSL_select_next_proto(
      &found, chosen_size, reinterpret_cast<const unsigned char*>(spoken.data()),
      static_cast<unsigned int>(spoken.size()), offered, offered_size);
  *chosen = found;
  return result == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

// gRPC's own libraries take these kinds of keys alone (BoringSSL): with another one the server
// would start, and refuse every handshake of a client.
bool HasKnownKey(const SSL_CTX& context) {
  EVP_PKEY* const key = SSL_CTX_get0_privatekey(&context);
  return key != nullptr &&
         (EVP_PKEY_get_base_id(key) == EVP_PKEY_RSA || EVP_PKEY_get_base_id(key) == EVP_PKEY_EC);
}

void Configure(SSL_CTX& context, bool require_client_certificate) {
  SSL_CTX_set_min_proto_version(&context, TLS1_2_VERSION);
  // A resumed session would skip the client's certificate, which may have been withdrawn.
  SSL_CTX_set_options(&context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_num_tickets(&context, 0);
  SSL_CTX_set_session_cache_mode(&context, SSL_SESS_CACHE_OFF);
  // An encrypted key is refused: nobody is there to type its password.
  SSL_CTX_set_default_passwd_cb(&context, [](char*, int, int, void*) { return -1; });
  SSL_CTX_set_mode(&context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                 SSL_MODE_RELEASE_BUFFERS);
  if (require_client_certificate) {
    SSL_CTX_set_verify(&context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
}

absl::Time ExpiryOf(const SSL_CTX& context) {
  const X509* const certificate = SSL_CTX_get0_certificate(&context);
  std::tm time{};
  if (certificate == nullptr || ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &time) != 1) {
    return absl::InfinitePast();
  }
  return absl::FromTM(time, absl::UTCTimeZone());
}

absl::Status BadFile(absl::string_view setting, const std::string& path, const char* wanted) {
  const std::string errors = TakeTlsErrors();
  return InvalidField(absl::StrCat("server.tls.", setting),
                      absl::StrCat(path, ": not ", wanted, errors.empty() ? "" : ": ", errors));
}

// A file of PEM, held open for OpenSSL, which opens files by name and reads whatever is there.
class PemFile {
 public:
  // INVALID_ARGUMENT names `setting` for what is no regular file, or too large.
  static absl::StatusOr<PemFile> Open(absl::string_view setting, const std::string& path) {
    absl::StatusOr<FileDescriptor> file = FileDescriptor::OpenRegular(path);
    absl::StatusOr<int64_t> bytes = file.ok() ? file->Size() : file.status();
    if (bytes.ok() && *bytes > kMaxPemBytes) {
      bytes = absl::InvalidArgumentError(
          absl::StrCat(path, ": larger than the limit of ", kMaxPemBytes, " bytes"));
    }
    if (bytes.ok()) return PemFile(*std::move(file));
    return InvalidField(absl::StrCat("server.tls.", setting), bytes.status().message());
  }

  // The path that OpenSSL is given.
  const char* name() const { return name_.c_str(); }

 private:
  explicit PemFile(FileDescriptor file)
      : file_(std::move(file)), name_(absl::StrCat("/proc/self/fd/", file_.get())) {}

  FileDescriptor file_;
  std::string name_;
};

}  // namespace

absl::Status CheckAuthorities(const std::string& ca_file) {
  ERR_clear_error();
  TANDEM_ASSIGN_OR_RETURN(const PemFile file, PemFile::Open("ca_file", ca_file));
  STACK_OF(X509_NAME)* const names = SSL_load_client_CA_file(file.name());
  if (names == nullptr) return BadFile("ca_file", ca_file, "certificates (PEM)");
  sk_X509_NAME_pop_free(names, X509_NAME_free);
  return absl::OkStatus();
}

std::string TakeTlsErrors() {
  std::vector<std::string> reasons;
  while (const unsigned long error = ERR_get_error()) {  // NOLINT(google-runtime-int): OpenSSL's
    const char* const reason = ERR_reason_error_string(error);
    if (reason != nullptr) {
      reasons.emplace_back(reason);
    } else if (ERR_SYSTEM_ERROR(error)) {
      reasons.emplace_back(std::generic_category().message(ERR_GET_REASON(error)));
    }
  }
  // The queue begins with the cause.
  return reasons.empty() ? "" : reasons.front();
}

struct ServerTls::Identity {
  ContextPointer context{nullptr, SSL_CTX_free};
  absl::Time expiry;
};

absl::StatusOr<std::shared_ptr<const ServerTls::Identity>> ServerTls::ReadIdentity(
    const config::v1::TlsOptions& options) {
  ERR_clear_error();
  auto identity = std::make_shared<Identity>();
  identity->context = ContextPointer(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  SSL_CTX* const context = identity->context.get();
  if (context == nullptr) return absl::InternalError("OpenSSL is out of memory");
  Configure(*context, options.require_client_certificate());
  SSL_CTX_set_alpn_select_cb(context, ChooseProtocol, nullptr);
  TANDEM_ASSIGN_OR_RETURN(const PemFile certificate,
                          PemFile::Open("certificate_file", options.certificate_file()));
  if (SSL_CTX_use_certificate_chain_file(context, certificate.name()) != 1) {
    return BadFile("certificate_file", options.certificate_file(), "a certificate (PEM)");
  }
  TANDEM_ASSIGN_OR_RETURN(const PemFile key,
                          PemFile::Open("private_key_file", options.private_key_file()));
  if (SSL_CTX_use_PrivateKey_file(context, key.name(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return BadFile("private_key_file", options.private_key_file(),
                   "the unencrypted private key (PEM) of the certificate");
  }
  if (!HasKnownKey(*context)) {
    return InvalidField("server.tls.certificate_file",
                        absl::StrCat(options.certificate_file(),
                                     ": its key is neither RSA nor ECDSA, and gRPC's clients "
                                     "support only those (not Ed25519)"));
  }
  if (!options.ca_file().empty()) {
    TANDEM_ASSIGN_OR_RETURN(const PemFile authorities, PemFile::Open("ca_file", options.ca_file()));
    STACK_OF(X509_NAME)* const names = SSL_load_client_CA_file(authorities.name());
    if (names == nullptr ||
        SSL_CTX_load_verify_locations(context, authorities.name(), nullptr) != 1) {
      sk_X509_NAME_pop_free(names, X509_NAME_free);
      return BadFile("ca_file", options.ca_file(), "certificates (PEM)");
    }
    SSL_CTX_set_client_CA_list(context, names);  // takes the names
  }
  identity->expiry = ExpiryOf(*context);
  if (identity->expiry <= absl::Now()) {
    return InvalidField("server.tls.certificate_file",
                        absl::StrCat(options.certificate_file(), ": expired at ",
                                     absl::FormatTime(identity->expiry, absl::UTCTimeZone())));
  }
  return identity;
}

ServerTls::ServerTls(const config::v1::TlsOptions& options)
    : options_(options),
      stamps_({options.certificate_file(), options.private_key_file(), options.ca_file()}) {}

ServerTls::~ServerTls() = default;

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Load(const config::v1::TlsOptions& options) {
  std::unique_ptr<ServerTls> tls(new ServerTls(options));
  TANDEM_ASSIGN_OR_RETURN(tls->identity_, ReadIdentity(options));
  return tls;
}

std::unique_ptr<SSL, void (*)(SSL*)> ServerTls::NewConnection(TlsProtocol protocol) const {
  SSL* const connection = SSL_new(identity()->context.get());
  if (connection != nullptr && protocol == TlsProtocol::kHttp1) {
    static char http1;
    SSL_set_app_data(connection, &http1);
  }
  return {connection, SSL_free};
}

TlsProtocol ProtocolOf(const SSL& connection) {
  return SSL_get_app_data(&connection) == nullptr ? TlsProtocol::kHttp2 : TlsProtocol::kHttp1;
}

absl::StatusOr<bool> ServerTls::Refresh() {
  if (!stamps_.Changed()) return false;
  TANDEM_ASSIGN_OR_RETURN(identity_, ReadIdentity(options_));
  return true;
}

absl::Status ServerTls::CheckClient(const SSL& connection) const {
  const std::unique_ptr<X509, void (*)(X509*)> certificate(SSL_get1_peer_certificate(&connection),
                                                           X509_free);
  if (certificate == nullptr) return absl::OkStatus();  // none was asked for
  const std::shared_ptr<const Identity> current = identity();
  const std::unique_ptr<X509_STORE_CTX, void (*)(X509_STORE_CTX*)> check(X509_STORE_CTX_new(),
                                                                         X509_STORE_CTX_free);
  if (check == nullptr ||
      X509_STORE_CTX_init(check.get(), SSL_CTX_get_cert_store(current->context.get()),
                          certificate.get(), SSL_get_peer_cert_chain(&connection)) != 1) {
    return absl::InternalError("OpenSSL is out of memory");
  }
  X509_STORE_CTX_set_default(check.get(), "ssl_client");
  if (X509_verify_cert(check.get()) == 1) return absl::OkStatus();
  ERR_clear_error();
  return absl::UnauthenticatedError(
      absl::StrCat("the client's certificate is no longer valid: ",
                   X509_verify_cert_error_string(X509_STORE_CTX_get_error(check.get()))));
}

std::shared_ptr<const ServerTls::Identity> ServerTls::identity() const { return identity_; }

absl::Time ServerTls::expiry() const { return identity()->expiry; }

}  // namespace tandem::rpc
