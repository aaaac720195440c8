#include "common/rpc/guard/connection_guard.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/logging.h"
#include "common/base/machine/host_port.h"
#include "common/base/steady_time.h"
#include "common/rpc/guard/client_stream.h"
#include "common/rpc/guard/http2_inspector.h"
#include "common/rpc/guard/socket.h"
#include "common/rpc/rate_limit.h"

namespace tandem::rpc {
namespace {

// How long answers may take to reach their clients once the server has ended.
constexpr absl::Duration kFlushTime = absl::Seconds(1);
// The share of an address's churn that a handshake takes: a signature of a large key is
// milliseconds of work.
constexpr double kHandshakeChurn = 2;
// Time in which a client must have finished its TLS handshake.
constexpr absl::Duration kHandshakeTime = absl::Seconds(10);
// How often connections that wait are looked at.
constexpr int kPollMilliseconds = 20;
// Reads of one connection before the others have their turn.
constexpr int kReadsPerTurn = 4;
// Addresses whose churn is remembered, before those that owe nothing are forgotten.
constexpr size_t kMaxHosts = 4096;

// Why the guard closed a connection: the values of the label `reason`, after ConnectionLimits.
namespace cause {
constexpr char kChurn[] = "churn";
constexpr char kConnections[] = "connections";
constexpr char kConnectionStreams[] = "connection_streams";
constexpr char kControlFrames[] = "control_frames";
constexpr char kCredentials[] =
    "credentials";  // the client's certificate was withdrawn, or expired
constexpr char kOpenStreams[] = "open_streams";
constexpr char kProtocol[] = "protocol";  // not HTTP/2, or beyond the inspector's bounds
constexpr char kResets[] = "resets";
constexpr char kUnfinishedBytes[] = "unfinished_bytes";
constexpr const char* kAll[] = {kChurn,         kConnections, kConnectionStreams,
                                kControlFrames, kCredentials, kOpenStreams,
                                kProtocol,      kResets,      kUnfinishedBytes};
}  // namespace cause

void Enable(const Socket& socket, int level, int option) {
  const int on = 1;
  setsockopt(socket.get(), level, option, &on, sizeof(on));
}

// Returns an invalid socket if `address` cannot be bound.
Socket ListenAt(const addrinfo& address, int port) {
  Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return socket;
  Enable(socket, SOL_SOCKET, SO_REUSEADDR);
  if (address.ai_family == AF_INET6) {
    const int v6_only = 0;
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only));
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port =
        htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = htons(static_cast<uint16_t>(port));
  }
  if (bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return Socket(-1);
  }
  return socket;
}

int PortOf(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// The numeric address of a client, without its port.
std::string HostOf(const sockaddr_storage& address, socklen_t size) {
  char host[NI_MAXHOST] = "";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof(host), nullptr, 0,
              NI_NUMERICHOST);
  return host;
}

// `count` events at once, and as many again in `seconds`.
RateLimit BurstOf(int64_t count, double seconds) {
  return {static_cast<double>(count), static_cast<double>(count) / seconds, SteadyTime::Now()};
}

// Ends the part of a socket's name that PeerName returns; gRPC does not escape it.
constexpr char kNameEnd[] = "@";

// Gives a socket a name that its peer can ask for. The name needs no file: it begins with a NUL
// byte (unix(7), abstract). Processes share such names, so this one is made unique.
void NameSocket(const Socket& socket, absl::string_view name) {
  static thread_local std::random_device random;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string unique =
      absl::StrCat(name.substr(0, 80), kNameEnd, absl::Hex(random()), absl::Hex(random()));
  unique.copy(address.sun_path + 1, unique.size());
  // Without a name the connection is as good; the log then does not say whose it was.
  (void)bind(socket.get(), reinterpret_cast<const sockaddr*>(&address),
             static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + unique.size()));
}

// An empty SETTINGS frame, with which a server must begin.
std::string Settings() { return std::string("\0\0\0\4\0\0\0\0\0", 9); }

// A GOAWAY frame (RFC 9113 section 6.8) with the error ENHANCE_YOUR_CALM.
std::string GoAway(absl::string_view reason) {
  std::string frame(9 + 8, '\0');
  const size_t length = 8 + reason.size();
  frame[1] = static_cast<char>(length >> 8);
  frame[2] = static_cast<char>(length);
  frame[3] = 7;     // GOAWAY
  frame[9] = 0x7f;  // the last stream that was processed: all may have been
  frame[10] = frame[11] = frame[12] = static_cast<char>(0xff);
  frame[16] = 0xb;  // ENHANCE_YOUR_CALM
  return absl::StrCat(frame, reason);
}

}  // namespace

class ConnectionGuard::Relay {
 public:
  Relay(std::vector<Socket> listeners, Metrics& metrics, const ServerTls* tls,
        const ConnectionLimits& limits)
      : limits_(limits),
        metrics_(metrics),
        connections_gauge_(metrics.Gauge(metric::kConnections)),
        tls_(tls),
        listeners_(std::move(listeners)),
        port_(PortOf(listeners_[0])),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        resets_(BurstOf(limits.max_resets_per_second, 1)),
        log_lines_(10, 1, SteadyTime::Now()) {
    // The counters exist from the start, for alerts.
    for (const char* cause : cause::kAll) metrics_.Counter(metric::kConnectionsClosed, {cause});
  }

  ~Relay() {
    ending_ = true;
    listening_ = false;
    Wake();
    if (thread_.joinable()) thread_.join();
  }

  // False when the process is out of file descriptors.
  bool valid() const { return epoll_.valid() && wake_.valid(); }
  int port() const { return port_; }

  void Start(std::function<void(int fd)> serve) {
    serve_ = std::move(serve);
    Watch(wake_.get(), EPOLLIN, &wake_end_);
    for (const Socket& listener : listeners_) Watch(listener.get(), EPOLLIN, &listener_end_);
    thread_ = std::thread([this] { Run(); });
  }

  void EndWithdrawn() {
    look_at_certificates_ = true;
    Wake();
  }

  void StopListening() {
    listening_ = false;
    Wake();
  }

 private:
  struct Connection;
  // The socket that an event of epoll names: one end of a connection.
  struct End {
    Connection* connection = nullptr;
  };
  // The bytes of one direction.
  struct Direction {
    std::string pending;  // read, but not yet written
    bool ended = false;   // nothing more can be read
  };
  struct Connection {
    Connection(std::string client_host, ClientStream client_stream, const ConnectionLimits& limits)
        : host(std::move(client_host)),
          client(std::move(client_stream)),
          resets(BurstOf(limits.max_resets, 10)),
          control_frames(BurstOf(limits.max_control_frames, 10)) {}
    const std::string host;
    ClientStream client;
    Socket server{-1};  // gRPC has the other end, once hands are shaken
    End client_end{this};
    End server_end{this};
    bool server_gone = false;  // gRPC closed its end; what it wrote may still be read
    bool closed = false;
    bool held_back = false;  // too many resets of all connections: not read for a while
    Direction to_server;
    Direction to_client;
    Http2Inspector inspector;
    RateLimit resets;
    RateLimit control_frames;
    int64_t unfinished_bytes = 0;  // as counted in the totals
    int64_t open_streams = 0;
    int64_t num_resets = 0;
    int64_t num_control_frames = 0;
    const SteadyTime accepted = SteadyTime::Now();
    SteadyTime active = accepted;
  };

  void Wake() {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
  }

  void Watch(int fd, uint32_t events, End* end) {
    epoll_event event{.events = events, .data = {.ptr = end}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    }
  }

  void Run() {
    // A client that is gone is an error of the write, not a signal.
    sigset_t broken_pipe;
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
    std::optional<SteadyTime> deadline;
    std::array<epoll_event, 64> events;
    while (true) {
      const bool waits =
          accept_later_ || num_held_back_ > 0 || num_handshakes_ > 0 || deadline.has_value();
      const int count =
          epoll_wait(epoll_.get(), events.data(), events.size(), waits ? kPollMilliseconds : -1);
      for (int i = 0; i < std::max(count, 0); ++i) OnEvent(events[i]);
      if (accept_later_) AcceptAll();
      if (look_at_certificates_.exchange(false)) CheckCertificates();
      for (Connection& connection : connections_) {
        if (connection.held_back && !connection.closed) Release(connection);
        if (num_handshakes_ > 0) CheckHandshake(connection);
      }
      connections_.remove_if([](const Connection& connection) { return connection.closed; });
      connections_gauge_.Set(static_cast<double>(connections_.size()));
      if (!listening_) listeners_.clear();
      if (!ending_) continue;
      if (!deadline.has_value()) deadline = SteadyTime::Now() + kFlushTime;
      if (connections_.empty() || SteadyTime::Now() > *deadline) return;
    }
  }

  void OnEvent(const epoll_event& event) {
    End* const end = static_cast<End*>(event.data.ptr);
    if (end == &wake_end_) {
      uint64_t count = 0;
      (void)!read(wake_.get(), &count, sizeof(count));
      return;
    }
    if (end == &listener_end_) {
      AcceptAll();
      return;
    }
    Connection& connection = *end->connection;
    if (connection.closed) return;
    const bool gone = (event.events & (EPOLLHUP | EPOLLERR)) != 0;
    if (end == &connection.client_end) {
      if (gone) {
        Close(connection);
        return;
      }
      if (!connection.server.valid()) {
        Handshake(connection);
        return;
      }
      if ((event.events & EPOLLIN) != 0 || connection.client.wants_write()) ReadClient(connection);
      if ((event.events & EPOLLOUT) != 0) ReadServer(connection);
    } else {
      if (gone && !std::exchange(connection.server_gone, true)) {
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.server.get(), nullptr);
      }
      if ((event.events & EPOLLOUT) != 0 && !connection.server_gone) ReadClient(connection);
      if (gone || (event.events & EPOLLIN) != 0) ReadServer(connection);
    }
    if (!connection.closed) WatchBoth(connection);
  }

  // A direction is read while nothing of it waits to be written.
  void WatchBoth(Connection& connection) {
    const auto events = [](bool read, bool write) {
      return (read ? uint32_t{EPOLLIN} : 0) | (write ? uint32_t{EPOLLOUT} : 0);
    };
    const Direction& to_server = connection.to_server;
    const Direction& to_client = connection.to_client;
    const bool read = !to_server.ended && to_server.pending.empty() && !connection.held_back;
    // OpenSSL may have to answer before it reads on (a key update).
    const bool wants_write = connection.client.wants_write();
    Watch(connection.client.fd(),
          events(read && !wants_write, !to_client.pending.empty() || (read && wants_write)),
          &connection.client_end);
    if (connection.server_gone) return;
    Watch(connection.server.get(),
          events(!to_client.ended && to_client.pending.empty(), !to_server.pending.empty()),
          &connection.server_end);
  }

  void AcceptAll() {
    accept_later_ = false;
    for (const Socket& listener : listeners_) {
      while (listening_) {
        sockaddr_storage address{};
        socklen_t size = sizeof(address);
        Socket client(accept4(listener.get(), reinterpret_cast<sockaddr*>(&address), &size,
                              SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!client.valid()) {
          // Out of file descriptors, for example: the connection waits in the system's queue.
          accept_later_ = errno != EAGAIN && errno != EWOULDBLOCK;
          break;
        }
        Accept(HostOf(address, size), std::move(client));
      }
    }
  }

  void Accept(std::string host, Socket client) {
    RateLimit& churn = ChurnOf(host);
    if (churn.overdrawn(SteadyTime::Now())) {
      Refuse(host, std::move(client), cause::kChurn,
             "too many connections from this address were opened, or closed with open calls");
      return;
    }
    churn.Take(tls_ == nullptr ? 1 : kHandshakeChurn, SteadyTime::Now());
    if (!MakeRoom(host)) {
      Refuse(host, std::move(client), cause::kConnections,
             "the server has reached its connection limit, and all connections have calls");
      return;
    }
    Enable(client, IPPROTO_TCP, TCP_NODELAY);
    ClientStream::Tls tls{nullptr, nullptr};
    if (tls_ != nullptr) {
      tls = tls_->NewConnection(TlsProtocol::kHttp2);
      if (tls == nullptr) {
        LogClosed(host, "refused: the process has no memory for TLS");
        return;
      }
    }
    Connection& connection = connections_.emplace_back(
        std::move(host), ClientStream(std::move(client), std::move(tls)), limits_);
    ++num_handshakes_;
    Handshake(connection);
  }

  // Begins to relay once the client has shaken hands: at once without TLS.
  void Handshake(Connection& connection) {
    ClientStream::Denial denial;
    switch (connection.client.Handshake(&denial)) {
      case ClientStream::HandshakeState::kDone:
        Serve(connection);
        break;
      case ClientStream::HandshakeState::kWaiting:
        Watch(connection.client.fd(), connection.client.wants_write() ? EPOLLOUT : EPOLLIN,
              &connection.client_end);
        break;
      case ClientStream::HandshakeState::kDenied:
        Deny(connection, denial);
        break;
    }
  }

  void Serve(Connection& connection) {
    if (!listening_) {  // gRPC takes no connection any more
      Close(connection);
      return;
    }
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
      LogClosed(connection.host, "refused: the process is out of file descriptors");
      Close(connection);
      return;
    }
    --num_handshakes_;
    connection.server = Socket(pair[0]);
    const std::string common_name = connection.client.CommonName();
    NameSocket(connection.server, common_name.empty()
                                      ? connection.host
                                      : absl::StrCat(connection.host, "(", common_name, ")"));
    serve_(pair[1]);
    // Bytes that came with the end of the handshake wait in the stream.
    ReadClient(connection);
    if (!connection.closed) WatchBoth(connection);
  }

  void CheckHandshake(Connection& connection) {
    if (connection.closed || connection.server.valid()) return;
    if (!listening_) {
      Close(connection);
      return;
    }
    if (SteadyTime::Now() < connection.accepted + kHandshakeTime) return;
    Deny(connection, ClientStream::TooSlow());
  }

  void CheckCertificates() {
    for (Connection& connection : connections_) {
      if (connection.closed || !connection.server.valid() || connection.client.tls() == nullptr) {
        continue;
      }
      const absl::Status status = tls_->CheckClient(*connection.client.tls());
      if (status.ok()) continue;
      metrics_.Counter(metric::kAuthDenials, {"certificate_refused"}).Increment();
      Refuse(connection, cause::kCredentials, status.message());
    }
  }

  void Deny(Connection& connection, const ClientStream::Denial& denial) {
    metrics_.Counter(metric::kAuthDenials, {denial.reason}).Increment();
    LogClosed(connection.host, denial.message);
    Close(connection);
  }

  void ReadClient(Connection& connection) {
    for (int i = 0; i < kReadsPerTurn && !connection.closed && !connection.held_back; ++i) {
      if (!FlushToServer(connection)) {
        ServerGone(connection);
        return;
      }
      if (!connection.to_server.pending.empty()) return;
      const ssize_t size = connection.client.Read(buffer_.data(), buffer_.size());
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (size < 0) {
        Close(connection);
        return;
      }
      if (size == 0) {
        connection.to_server.ended = true;
        shutdown(connection.server.get(), SHUT_WR);
        return;
      }
      const absl::string_view bytes(buffer_.data(), static_cast<size_t>(size));
      const absl::Status status = connection.inspector.OnClientBytes(bytes);
      if (!status.ok()) {
        Refuse(connection, cause::kProtocol, status.message());
        return;
      }
      Count(connection);
      if (connection.closed) return;
      connection.to_server.pending = std::string(bytes);
      if (!FlushToServer(connection)) {
        ServerGone(connection);
        return;
      }
    }
  }

  void ReadServer(Connection& connection) {
    // Nothing tells of what is left once gRPC is gone: all of it is read.
    for (int i = 0; (i < kReadsPerTurn || connection.server_gone) && !connection.closed; ++i) {
      if (!FlushToClient(connection)) {
        Close(connection);
        return;
      }
      if (!connection.to_client.pending.empty()) return;
      if (connection.to_client.ended) {
        Close(connection);
        return;
      }
      const ssize_t size = recv(connection.server.get(), buffer_.data(), buffer_.size(), 0);
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (size <= 0) {
        connection.to_client.ended = true;
        continue;
      }
      const absl::string_view bytes(buffer_.data(), static_cast<size_t>(size));
      connection.inspector.OnServerBytes(bytes);
      Count(connection);
      connection.to_client.pending = std::string(bytes);
    }
  }

  // gRPC takes no more; what it has written still goes to the client.
  void ServerGone(Connection& connection) {
    connection.to_server.pending.clear();
    connection.to_server.ended = true;
  }

  // The next two return false if the receiver is gone.
  bool FlushToServer(Connection& connection) {
    return Flush(connection.to_server, [&](absl::string_view bytes) {
      return send(connection.server.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    });
  }
  bool FlushToClient(Connection& connection) {
    return Flush(connection.to_client,
                 [&](absl::string_view bytes) { return connection.client.Write(bytes); });
  }
  template <typename Write>
  bool Flush(Direction& direction, Write write) {
    absl::string_view rest = direction.pending;
    while (!rest.empty()) {
      const ssize_t size = write(rest);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno != EAGAIN) return false;
      if (size <= 0) break;
      rest.remove_prefix(static_cast<size_t>(size));
    }
    direction.pending.erase(0, direction.pending.size() - rest.size());
    return true;
  }

  // Brings the totals up to date and closes who is beyond a limit.
  void Count(Connection& connection) {
    const Http2Inspector& inspector = connection.inspector;
    const SteadyTime now = SteadyTime::Now();
    connection.active = now;
    unfinished_bytes_ += inspector.unfinished_bytes() -
                         std::exchange(connection.unfinished_bytes, inspector.unfinished_bytes());
    open_streams_ +=
        inspector.open_streams() - std::exchange(connection.open_streams, inspector.open_streams());
    const auto resets = static_cast<double>(
        inspector.resets() - std::exchange(connection.num_resets, inspector.resets()));
    if (resets > 0) {
      if (!connection.resets.Take(resets, now)) {
        Refuse(connection, cause::kResets,
               absl::StrCat("too many calls were reset: more than ", limits_.max_resets,
                            " in ten seconds"));
        return;
      }
      if (!resets_.Take(resets, now) && !std::exchange(connection.held_back, true)) {
        ++num_held_back_;
      }
    }
    const auto control_frames = static_cast<double>(
        inspector.control_frames() -
        std::exchange(connection.num_control_frames, inspector.control_frames()));
    if (control_frames > 0 && !connection.control_frames.Take(control_frames, now)) {
      Refuse(connection, cause::kControlFrames,
             absl::StrCat("more than ", limits_.max_control_frames,
                          " PING and SETTINGS frames in ten seconds"));
      return;
    }
    if (connection.open_streams > limits_.max_connection_streams) {
      Refuse(connection, cause::kConnectionStreams,
             absl::StrCat("more than ", limits_.max_connection_streams,
                          " calls at once on one connection"));
      return;
    }
    if (unfinished_bytes_ > limits_.max_unfinished_bytes) {
      Refuse(Largest(&Connection::unfinished_bytes), cause::kUnfinishedBytes,
             absl::StrCat("incomplete messages take more than ", limits_.max_unfinished_bytes,
                          " bytes of the server's memory, most of them on this connection"));
    }
    if (open_streams_ > limits_.max_open_streams) {
      Refuse(Largest(&Connection::open_streams), cause::kOpenStreams,
             absl::StrCat("the server has more than ", limits_.max_open_streams,
                          " open streams, most of them on this connection"));
    }
  }

  Connection& Largest(int64_t Connection::*value) {
    return *std::max_element(
        connections_.begin(), connections_.end(),
        [value](const Connection& a, const Connection& b) { return a.*value < b.*value; });
  }

  // Reads a connection again that was held back, once there is room for its resets.
  void Release(Connection& connection) {
    if (resets_.overdrawn(SteadyTime::Now())) return;
    connection.held_back = false;
    --num_held_back_;
    WatchBoth(connection);
  }

  // Closes a connection if one more, from `host`, would be too many. Returns false if the new one
  // has to be refused.
  bool MakeRoom(const std::string& host) {
    const auto live = std::count_if(connections_.begin(), connections_.end(),
                                    [](const Connection& it) { return !it.closed; });
    if (live < limits_.max_connections) return true;
    // A client that has not finished its handshake has shown nothing yet; the oldest is silent,
    // most likely.
    const auto unfinished =
        std::find_if(connections_.begin(), connections_.end(),
                     [](const Connection& it) { return !it.closed && !it.server.valid(); });
    if (unfinished != connections_.end()) {
      Refuse(
          *unfinished, cause::kConnections,
          "the server has reached its connection limit, and this connection has not finished its "
          "TLS handshake");
      return true;
    }
    std::map<std::string, int> counts;
    for (const Connection& connection : connections_) {
      if (!connection.closed) ++counts[connection.host];
    }
    const auto largest =
        std::max_element(counts.begin(), counts.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    const int own = counts[host];
    if (largest->second > own + 1) {
      Connection* idlest = Idlest([&](const Connection& it) { return it.host == largest->first; });
      Refuse(idlest != nullptr ? *idlest : Newest(largest->first), cause::kConnections,
             "the server has reached its connection limit, and most connections are from this "
             "address");
      return true;
    }
    // An address never pays for one that has as many connections as itself.
    Connection* idlest =
        Idlest([&](const Connection& it) { return it.host == host || counts[it.host] > own; });
    if (idlest == nullptr) return false;
    Refuse(*idlest, cause::kConnections,
           "the server has reached its connection limit, and this connection has no call");
    return true;
  }

  // Returns the connection that has been without a call for longest among those that `includes`
  // names; nullptr when all of them have calls.
  template <typename Predicate>
  Connection* Idlest(Predicate includes) {
    Connection* idlest = nullptr;
    for (Connection& connection : connections_) {
      if (connection.closed || !includes(connection)) continue;
      if (connection.open_streams > 0 && !connection.held_back) continue;
      if (idlest == nullptr || connection.active < idlest->active) idlest = &connection;
    }
    return idlest;
  }

  // Returns the connection of `host` that was accepted last; there must be one.
  Connection& Newest(const std::string& host) {
    return *std::find_if(connections_.rbegin(), connections_.rend(),
                         [&](const Connection& it) { return !it.closed && it.host == host; });
  }

  // Closes a connection and tells its client why. The closing is counted before the client knows.
  void Refuse(Connection& connection, const char* cause, absl::string_view reason) {
    CountClosed(connection.host, cause, reason);
    const Http2Inspector& inspector = connection.inspector;
    if (connection.server.valid() && connection.to_client.pending.empty() &&
        inspector.between_server_frames()) {
      SayGoAway(connection.client, inspector.server_has_spoken(), reason);
    }
    Close(connection);
  }

  // Tells the client of a connection that is not accepted why, unless that would take a handshake.
  void Refuse(const std::string& host, Socket client, const char* cause, absl::string_view reason) {
    CountClosed(host, cause, reason);
    if (tls_ == nullptr) {
      ClientStream stream(std::move(client), {nullptr, nullptr});
      SayGoAway(stream, /*server_has_spoken=*/false, reason);
    }
  }

  static void SayGoAway(ClientStream& client, bool server_has_spoken, absl::string_view reason) {
    const std::string frames = absl::StrCat(server_has_spoken ? "" : Settings(), GoAway(reason));
    (void)client.Write(frames);
    client.EndWrites();
    // Bytes that nobody has read would turn the end of the connection into a reset, which may
    // overtake the frame.
    std::array<char, 16 << 10> unread;
    for (int i = 0; i < kReadsPerTurn; ++i) {
      if (recv(client.fd(), unread.data(), unread.size(), 0) <= 0) break;
    }
  }

  // The churn that clients of an address have left.
  RateLimit& ChurnOf(const std::string& host) {
    const SteadyTime now = SteadyTime::Now();
    if (churn_.size() >= kMaxHosts) {
      for (auto entry = churn_.begin(); entry != churn_.end();) {
        entry = entry->second.overdrawn(now) ? std::next(entry) : churn_.erase(entry);
      }
    }
    return churn_.try_emplace(host, BurstOf(limits_.max_churn, 2)).first->second;
  }

  // The object stays until the end of the turn: other events may name it.
  void Close(Connection& connection) {
    if (std::exchange(connection.closed, true)) return;
    // As dear as resetting the calls.
    ChurnOf(connection.host).Take(static_cast<double>(connection.open_streams), SteadyTime::Now());
    unfinished_bytes_ -= std::exchange(connection.unfinished_bytes, 0);
    open_streams_ -= std::exchange(connection.open_streams, 0);
    if (connection.held_back) --num_held_back_;
    if (!connection.server.valid()) --num_handshakes_;
    connection.client = ClientStream(Socket(-1), {nullptr, nullptr});
    connection.server = Socket(-1);
  }

  void CountClosed(const std::string& host, const char* cause, absl::string_view reason) {
    metrics_.Counter(metric::kConnectionsClosed, {cause}).Increment();
    LogClosed(host, reason);
  }

  void LogClosed(const std::string& host, absl::string_view reason) {
    if (log_lines_.overdrawn(SteadyTime::Now()) || !log_lines_.Take(1, SteadyTime::Now())) {
      ++unlogged_;
      return;
    }
    Log(LogLevel::kWarning, "connection_closed",
        {{"message", reason}, {"peer", host}, {"not_logged", std::exchange(unlogged_, 0)}});
  }

  const ConnectionLimits limits_;
  Metrics& metrics_;
  prometheus::Gauge& connections_gauge_;
  const ServerTls* const tls_;
  std::vector<Socket> listeners_;
  const int port_;
  const Socket epoll_;
  const Socket wake_;
  End wake_end_;
  End listener_end_;
  std::atomic<bool> listening_ = true;
  std::atomic<bool> ending_ = false;
  std::atomic<bool> look_at_certificates_ = false;
  std::function<void(int fd)> serve_;
  std::thread thread_;

  // The thread's own.
  std::list<Connection> connections_;
  std::array<char, ClientStream::kReadBytes> buffer_;
  int64_t unfinished_bytes_ = 0;
  int64_t open_streams_ = 0;
  int64_t num_held_back_ = 0;
  int64_t num_handshakes_ = 0;  // connections that do not yet relay
  bool accept_later_ = false;
  RateLimit resets_;
  std::map<std::string, RateLimit> churn_;  // by address
  RateLimit log_lines_;
  int64_t unlogged_ = 0;
};

absl::StatusOr<std::unique_ptr<ConnectionGuard>> ConnectionGuard::Listen(
    const std::string& host, int port, Metrics& metrics, const ServerTls* tls,
    const ConnectionLimits& limits) {
  const std::string name(WithoutBrackets(host));
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  std::vector<Socket> listeners;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &addresses) == 0) {
    for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
      // A name with several addresses has one port.
      Socket listener = ListenAt(*address, listeners.empty() ? port : PortOf(listeners[0]));
      if (listener.valid()) listeners.push_back(std::move(listener));
    }
    freeaddrinfo(addresses);
  }
  if (listeners.empty()) return absl::UnavailableError("the address cannot be bound");
  auto relay = std::make_unique<Relay>(std::move(listeners), metrics, tls, limits);
  if (!relay->valid()) return absl::UnavailableError("the process is out of file descriptors");
  return std::unique_ptr<ConnectionGuard>(new ConnectionGuard(std::move(relay)));
}

ConnectionGuard::ConnectionGuard(std::unique_ptr<Relay> relay) : relay_(std::move(relay)) {}
ConnectionGuard::~ConnectionGuard() = default;
int ConnectionGuard::port() const { return relay_->port(); }
void ConnectionGuard::Start(std::function<void(int fd)> serve) { relay_->Start(std::move(serve)); }
void ConnectionGuard::EndWithdrawn() { relay_->EndWithdrawn(); }
void ConnectionGuard::StopListening() { relay_->StopListening(); }

std::string PeerName(const std::string& grpc_peer) {
  constexpr absl::string_view kScheme = "unix-abstract:";
  if (!absl::StartsWith(grpc_peer, kScheme)) return "";
  return grpc_peer.substr(kScheme.size(), grpc_peer.rfind(kNameEnd) - kScheme.size());
}

}  // namespace tandem::rpc
