#include "common/rpc/server/metrics_endpoint.h"

#include <fcntl.h>
#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <semaphore>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/machine/host_port.h"
#include "common/base/steady_time.h"
#include "common/rpc/guard/client_stream.h"

namespace tandem::rpc {
namespace {

// A slow connection holds a thread until the timeout.
constexpr int kThreads = 8;
constexpr absl::Duration kTimeout = absl::Seconds(3);
// Connections that are accepted; more wait in the system's queue.
constexpr int kMaxConnections = 32;
// httplib bounds neither lines nor headers.
constexpr int64_t kMaxRequestBytes = 6 << 10;

// httplib's own pool accepts any number of connections.
class BoundedPool final : public httplib::TaskQueue {
 public:
  void enqueue(std::function<void()> task) override {
    room_.acquire();
    pool_.enqueue([this, task = std::move(task)] {
      task();
      room_.release();
    });
  }
  void shutdown() override { pool_.shutdown(); }

 private:
  std::counting_semaphore<kMaxConnections> room_{kMaxConnections};
  httplib::ThreadPool pool_{kThreads};
};

// One request and its answer, within kMaxRequestBytes and kTimeout.
class BoundedStream final : public httplib::Stream {
 public:
  explicit BoundedStream(ClientStream& client) : client_(client) {}

  // Returns false if the client does not get through the handshake.
  bool Handshake(ClientStream::Denial* denial) {
    while (true) {
      switch (client_.Handshake(denial)) {
        case ClientStream::HandshakeState::kDone:
          return true;
        case ClientStream::HandshakeState::kDenied:
          return false;
        case ClientStream::HandshakeState::kWaiting:
          break;
      }
      if (WaitFor(client_.wants_write() ? POLLOUT : POLLIN)) continue;
      *denial = ClientStream::TooSlow();
      return false;
    }
  }

  bool is_readable() const override { return true; }
  bool is_writable() const override { return true; }
  ssize_t read(char* out, size_t size) override {
    while (unread_.empty()) {
      const ssize_t received = client_.Read(buffer_.data(), buffer_.size());
      if (received == 0 || (received < 0 && (errno != EAGAIN || !WaitFor(POLLIN)))) return received;
      if (received > 0) unread_ = absl::string_view(buffer_.data(), static_cast<size_t>(received));
    }
    const size_t taken = std::min(size, unread_.size());
    num_read_ += static_cast<int64_t>(taken);
    if (num_read_ > kMaxRequestBytes) return -1;
    unread_.substr(0, taken).copy(out, taken);
    unread_.remove_prefix(taken);
    return static_cast<ssize_t>(taken);
  }
  ssize_t write(const char* bytes, size_t size) override {
    while (true) {
      const ssize_t sent = client_.Write(absl::string_view(bytes, size));
      if (sent >= 0 || errno != EAGAIN || !WaitFor(POLLOUT)) return sent;
    }
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return client_.fd(); }

 private:
  // Returns false once the time is up.
  bool WaitFor(int16_t events) const {
    pollfd waiting{.fd = client_.fd(), .events = events, .revents = 0};
    const int64_t left = absl::ToInt64Milliseconds(deadline_ - SteadyTime::Now());
    return left > 0 && poll(&waiting, 1, static_cast<int>(left)) > 0;
  }

  ClientStream& client_;
  const SteadyTime deadline_ = SteadyTime::Now() + kTimeout;
  std::array<char, ClientStream::kReadBytes> buffer_;
  absl::string_view unread_;
  int64_t num_read_ = 0;
};

class BoundedServer final : public httplib::Server {
 public:
  BoundedServer(const ServerTls* tls, Metrics& metrics) : tls_(tls), metrics_(metrics) {}

 private:
  bool process_and_close_socket(socket_t fd) override {
    Socket socket(fd);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    ClientStream::Tls tls{nullptr, nullptr};
    if (tls_ != nullptr) {
      tls = tls_->NewConnection(TlsProtocol::kHttp1);
      if (tls == nullptr) return false;
    }
    ClientStream client(std::move(socket), std::move(tls));
    // On the heap: it is larger than what a stack should give away.
    const auto stream = std::make_unique<BoundedStream>(client);
    ClientStream::Denial denial;
    if (!stream->Handshake(&denial)) {
      metrics_.Counter(metric::kAuthDenials, {denial.reason}).Increment();
      return false;
    }
    bool closed = false;
    const bool answered = process_request(*stream, /*close_connection=*/true, closed, nullptr);
    client.EndWrites();
    return answered;
  }

  const ServerTls* const tls_;
  Metrics& metrics_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Listen(
    const std::string& host, int port, const ServerSecurity& security, Metrics& metrics) {
  std::unique_ptr<httplib::Server> server =
      std::make_unique<BoundedServer>(security.tls(), metrics);
  server->new_task_queue = [] { return new BoundedPool; };
  // httplib's own options let two servers share a port.
  server->set_socket_options([](socket_t socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  });
  // Bodies and ranges cost httplib memory before a handler hears of them.
  server->set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
    if (request.method == "GET" && request.ranges.empty()) {
      return httplib::Server::HandlerResponse::Unhandled;
    }
    response.status = 405;
    return httplib::Server::HandlerResponse::Handled;
  });
  server->Get("/metrics",
              [&security, &metrics](const httplib::Request& request, httplib::Response& response) {
                const absl::Status allowed = security.access().Check(
                    request.get_header_value(kAuthorizationKey), Role::ROLE_READER);
                if (!allowed.ok()) {
                  response.status = 401;
                  response.set_header("WWW-Authenticate", "Bearer");
                  response.set_content(std::string(allowed.message()) + "\n", "text/plain");
                  return;
                }
                response.set_content(metrics.Text(), "text/plain; version=0.0.4");
              });
  const std::string address(WithoutBrackets(host));
  const int bound = port == 0                             ? server->bind_to_any_port(address)
                    : server->bind_to_port(address, port) ? port
                                                          : -1;
  if (bound <= 0) return absl::UnavailableError("the address cannot be bound");
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(std::move(server), bound));
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<httplib::Server> server, int port)
    : server_(std::move(server)), port_(port), thread_([this] {
        // The pool's threads inherit it: a client that is gone is an error of the write.
        sigset_t broken_pipe;
        sigemptyset(&broken_pipe);
        sigaddset(&broken_pipe, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
        server_->listen_after_bind();
      }) {
  // A server that does not run yet cannot be stopped.
  while (!server_->is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

MetricsEndpoint::~MetricsEndpoint() {
  server_->stop();
  thread_.join();
}

}  // namespace tandem::rpc
