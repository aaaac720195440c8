// A socket that closes itself.
#ifndef TANDEM_COMMON_RPC_GUARD_SOCKET_H_
#define TANDEM_COMMON_RPC_GUARD_SOCKET_H_

#include <unistd.h>

#include <utility>

namespace tandem::rpc {

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GUARD_SOCKET_H_
