#include "common/ranks/transport/local_address.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {
namespace {

constexpr absl::Duration kRetryDelay = absl::Milliseconds(20);
// After this long without an answer the next address of the host is tried.
constexpr absl::Duration kLongestAttempt = absl::Seconds(5);

// Returns 0 or an errno.
int Connect(int fd, const addrinfo& target, SteadyTime deadline) {
  if (connect(fd, target.ai_addr, target.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  const absl::Duration left = std::min(deadline - SteadyTime::Now(), kLongestAttempt);
  pollfd ready = {.fd = fd, .events = POLLOUT, .revents = 0};
  if (poll(&ready, 1, static_cast<int>(std::max<int64_t>(absl::ToInt64Milliseconds(left), 1))) <=
      0) {
    return ETIMEDOUT;
  }
  int error = 0;
  socklen_t length = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

absl::StatusOr<std::string> Attempt(const addrinfo& target, SteadyTime deadline) {
  const int fd = socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::UnavailableError(std::strerror(errno));
  int error = Connect(fd, target, deadline);
  sockaddr_storage local = {};
  socklen_t length = sizeof(local);
  auto* generic = reinterpret_cast<sockaddr*>(&local);
  if (error == 0 && getsockname(fd, generic, &length) != 0) error = errno;
  close(fd);
  if (error != 0) return absl::UnavailableError(std::strerror(error));
  std::array<char, NI_MAXHOST> text = {};
  if (getnameinfo(generic, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return absl::UnavailableError("its address has no numeric form");
  }
  return std::string(text.data());
}

}  // namespace

absl::StatusOr<std::string> LocalAddressToward(const std::string& host, int port,
                                               SteadyTime deadline) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  absl::Status last = absl::UnavailableError("the time limit has passed");
  while (true) {
    addrinfo* found = nullptr;
    const int failed = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
    if (failed != 0) {
      last = absl::UnavailableError(gai_strerror(failed));
    } else {
      const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
      // IPv4 first, so that all ranks choose the same family where a name has both.
      for (const bool ipv4 : {true, false}) {
        for (const addrinfo* target = found; target != nullptr; target = target->ai_next) {
          if ((target->ai_family == AF_INET) != ipv4) continue;
          absl::StatusOr<std::string> address = Attempt(*target, deadline);
          if (address.ok()) return address;
          last = address.status();
        }
      }
    }
    if (SteadyTime::Now() + kRetryDelay >= deadline) return last;
    absl::SleepFor(kRetryDelay);
  }
}

}  // namespace tandem::ranks
