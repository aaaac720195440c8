// The bytes of a client on a non-blocking socket, plain or under TLS.
#ifndef TANDEM_COMMON_RPC_GUARD_CLIENT_STREAM_H_
#define TANDEM_COMMON_RPC_GUARD_CLIENT_STREAM_H_

#include <openssl/types.h>
#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "common/rpc/guard/socket.h"

namespace tandem::rpc {

// Not thread-safe. Its thread must ignore SIGPIPE.
class ClientStream {
 public:
  using Tls = std::unique_ptr<SSL, void (*)(SSL*)>;

  // `tls` is null for plain bytes.
  ClientStream(Socket socket, Tls tls);
  ClientStream(ClientStream&&) = default;
  ClientStream& operator=(ClientStream&&) = default;

  // Why a client was sent away: a value of the label `reason` of tandem_auth_denials_total, and a
  // sentence.
  struct Denial {
    std::string reason;
    std::string message;
  };
  // The denial of a client that takes too long.
  static Denial TooSlow();
  enum class HandshakeState { kDone, kWaiting, kDenied };
  // Goes on with the handshake; bytes may follow once it is done. Done at once without TLS.
  HandshakeState Handshake(Denial* denial);

  // Ciphertext that one system call takes.
  static constexpr size_t kReceiveBytes = 64 << 10;
  // The size of a buffer for Read: it holds what was received, and the part of a record (16 KiB at
  // most) that came before it.
  static constexpr size_t kReadBytes = kReceiveBytes + (16 << 10);

  // As recv and send. errno is EAGAIN while the stream has to wait for its socket. 0 from Read: the
  // client sends nothing more. `size` must be kReadBytes at least: epoll does not report bytes that
  // OpenSSL still holds.
  ssize_t Read(char* buffer, size_t size);
  ssize_t Write(absl::string_view bytes);
  // Whether the last Handshake or Read waits for room in the socket, not for bytes.
  bool wants_write() const { return wants_write_; }

  // Tells the client that nothing more comes.
  void EndWrites();

  // The common name of the client's certificate; "" without one. After the handshake.
  std::string CommonName() const;

  // Null for plain bytes.
  const SSL* tls() const { return tls_.get(); }
  int fd() const { return socket_.get(); }

 private:
  ssize_t Result(int returned);
  // Gives OpenSSL what the socket has; returns as recv.
  ssize_t Receive();

  // TLS goes first.
  Socket socket_;
  Tls tls_;
  BIO* received_ = nullptr;  // ciphertext that OpenSSL has not read; TLS owns it
  bool wants_write_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GUARD_CLIENT_STREAM_H_
