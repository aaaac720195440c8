#include "common/rpc/guard/client_stream.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/security/tls.h"

namespace tandem::rpc {
namespace {

// Records without data, such as key updates, among those of one Read. gRPC sends none.
constexpr int kMaxControlRecords = 16;

int AsInt(size_t size) {
  return static_cast<int>(std::min(size, size_t{std::numeric_limits<int>::max()}));
}

// Returns why a handshake failed; empties OpenSSL's queue of errors.
ClientStream::Denial DenialOf(const SSL& tls) {
  const unsigned long error = ERR_peek_error();  // NOLINT(google-runtime-int): OpenSSL's
  const std::string errors = TakeTlsErrors();
  if (const auto verified = SSL_get_verify_result(&tls); verified != X509_V_OK) {
    return {"certificate_refused", absl::StrCat("the client's certificate is refused: ",
                                                X509_verify_cert_error_string(verified))};
  }
  switch (ERR_GET_REASON(error)) {
    case SSL_R_HTTP_REQUEST:
    case SSL_R_WRONG_VERSION_NUMBER:
      return {"not_tls", "the client does not speak TLS"};
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return {"certificate_missing", "the client presented no certificate"};
    default:
      return {"handshake_failed",
              absl::StrCat("the TLS handshake failed: ",
                           errors.empty() ? "the client disconnected" : errors)};
  }
}

}  // namespace

ClientStream::ClientStream(Socket socket, Tls tls)
    : socket_(std::move(socket)), tls_(std::move(tls)) {
  if (tls_ == nullptr) return;
  // OpenSSL reads what Receive gives it: kReceiveBytes at most at a time, so that no client's
  // records hold up the others, and with one system call for several records.
  received_ = BIO_new(BIO_s_mem());
  BIO_set_mem_eof_return(received_, -1);  // empty means not yet
  BIO* const socket_bio = BIO_new_socket(socket_.get(), BIO_NOCLOSE);
  SSL_set_bio(tls_.get(), received_, socket_bio);  // takes both
  SSL_set_accept_state(tls_.get());
  // A read returns after a record without data, so that Read can count these.
  SSL_clear_mode(tls_.get(), SSL_MODE_AUTO_RETRY);
}

ClientStream::HandshakeState ClientStream::Handshake(Denial* denial) {
  if (tls_ == nullptr || SSL_is_init_finished(tls_.get()) != 0) return HandshakeState::kDone;
  const ssize_t received = Receive();
  const bool ended = received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR);
  ERR_clear_error();
  const int returned = SSL_do_handshake(tls_.get());
  if (returned != 1) {
    const int error = SSL_get_error(tls_.get(), returned);
    wants_write_ = error == SSL_ERROR_WANT_WRITE;
    if (!ended && (error == SSL_ERROR_WANT_READ || wants_write_)) return HandshakeState::kWaiting;
    *denial = DenialOf(*tls_);
    return HandshakeState::kDenied;
  }
  wants_write_ = false;
  const unsigned char* protocol = nullptr;
  unsigned int size = 0;
  SSL_get0_alpn_selected(tls_.get(), &protocol, &size);
  if (size == 0 && ProtocolOf(*tls_) == TlsProtocol::kHttp2) {
    *denial = {"handshake_failed", "the client offers no HTTP/2 (ALPN \"h2\")"};
    return HandshakeState::kDenied;
  }
  return HandshakeState::kDone;
}

ssize_t ClientStream::Read(char* buffer, size_t size) {
  if (tls_ == nullptr) return recv(fd(), buffer, size, 0);
  size_t total = 0;
  int num_control_records = 0;
  for (bool received = false; total < size;) {
    ERR_clear_error();
    const int returned = SSL_read(tls_.get(), buffer + total, AsInt(size - total));
    if (returned > 0) {
      total += static_cast<size_t>(returned);
      continue;
    }
    const int error = SSL_get_error(tls_.get(), returned);
    wants_write_ = error == SSL_ERROR_WANT_WRITE;
    const bool wants_more = error == SSL_ERROR_WANT_READ;
    if (wants_more && BIO_pending(received_) > 0) {
      if (++num_control_records <= kMaxControlRecords) continue;
      errno = EPROTO;
      return -1;
    }
    if (total > 0) break;  // an error comes again
    if (!wants_more || std::exchange(received, true)) return Result(returned);
    if (const ssize_t bytes = Receive(); bytes <= 0) return bytes;
  }
  return static_cast<ssize_t>(total);
}

ClientStream::Denial ClientStream::TooSlow() {
  return {"handshake_failed", "the client did not finish the TLS handshake in time"};
}

ssize_t ClientStream::Receive() {
  thread_local std::array<char, kReceiveBytes> bytes;
  const ssize_t size = recv(fd(), bytes.data(), bytes.size(), 0);
  if (size > 0) BIO_write(received_, bytes.data(), static_cast<int>(size));
  return size;
}

ssize_t ClientStream::Write(absl::string_view bytes) {
  if (tls_ == nullptr) return send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  ERR_clear_error();
  return Result(SSL_write(tls_.get(), bytes.data(), AsInt(bytes.size())));
}

ssize_t ClientStream::Result(int returned) {
  if (returned > 0) return returned;
  switch (SSL_get_error(tls_.get(), returned)) {
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      errno = EAGAIN;
      return -1;
    default:
      ERR_clear_error();
      errno = ECONNRESET;
      return -1;
  }
}

void ClientStream::EndWrites() {
  if (tls_ != nullptr) {
    ERR_clear_error();
    SSL_shutdown(tls_.get());
  }
  shutdown(fd(), SHUT_WR);
}

std::string ClientStream::CommonName() const {
  if (tls_ == nullptr) return "";
  const X509* const certificate = SSL_get0_peer_certificate(tls_.get());
  if (certificate == nullptr) return "";
  std::array<char, 65> name{};  // RFC 5280: at most 64 characters
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, name.data(),
                            static_cast<int>(name.size()));
  return name.data();
}

}  // namespace tandem::rpc
