// TLS and tokens on a real server: over gRPC, over bytes, and on the metrics port.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/guard/client_stream.h"
#include "common/rpc/guard/connection_guard.h"
#include "common/rpc/guard/socket.h"
#include "common/rpc/testing/certificates.h"
#include "common/rpc/testing/fake_weight_service.h"
#include "common/rpc/testing/raw_call.h"
#include "common/rpc/testing/server.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rpc {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using weights::v1::GetVersionRequest;
using weights::v1::GetVersionResponse;
using weights::v1::WeightService;

constexpr char kToken[] = "a-token-of-a-reader";

class SecurityTest : public testing::Test {
 protected:
  SecurityTest() {
    fs::create_directories(directory_);
    authority_.Issue("server");
    authority_.Issue("client");
  }
  ~SecurityTest() override { fs::remove_all(directory_); }

  static config::v1::ServerOptions Plain() {
    config::v1::ServerOptions options;
    options.set_keepalive_seconds(60);
    options.set_keepalive_timeout_seconds(60);
    return options;
  }
  // A server's options, and a client's: both show a certificate and trust an authority.
  config::v1::ServerOptions With(const TestAuthority& authority, const std::string& name) const {
    config::v1::ServerOptions options = Plain();
    options.mutable_tls()->set_certificate_file(authority.certificate_file(name));
    options.mutable_tls()->set_private_key_file(authority.private_key_file(name));
    options.mutable_tls()->set_ca_file(authority_.ca_file());
    return options;
  }
  config::v1::ServerOptions WithoutCertificate() const {
    config::v1::ServerOptions options = Plain();
    options.mutable_tls()->set_ca_file(authority_.ca_file());
    return options;
  }
  std::string TokenFile(const std::string& token) const {
    const fs::path path = directory_ / "token";
    std::ofstream(path) << token << "\n";
    return path;
  }

  void Start(const config::v1::ServerOptions& options) {
    server_ = std::make_unique<TestServer>(
        [](ServerRuntime& runtime) {
          return std::make_unique<FakeApp>(runtime, [](const GetVersionRequest&, const CallScope&) {
            return GetVersionResponse();
          });
        },
        CallExecutorOptions{.default_deadline = absl::Seconds(60),
                            .streams = {.patience = absl::Seconds(60)}},
        options);
  }
  absl::Status Call(const config::v1::ServerOptions& client) {
    const auto channel = MakeChannel(server_->address(), ToChannelOptions(client));
    return CallOver(channel);
  }
  static absl::Status CallOver(const std::shared_ptr<grpc::Channel>& channel) {
    const auto context = MakeClientContext(SteadyTime::Now() + absl::Seconds(20));
    GetVersionResponse response;
    return FromGrpcStatus(
        WeightService::NewStub(channel)->GetVersion(context.get(), {}, &response));
  }
  double Denials(const std::string& reason) {
    return server_->metrics().Counter(metric::kAuthDenials, {reason}).Value();
  }

  const fs::path directory_ =
      fs::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
  const TestAuthority authority_{directory_ / "ours"};
  static Socket ConnectTo(int port) {
    Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }

  std::unique_ptr<TestServer> server_;
};

TEST_F(SecurityTest, AClientWithACertificateOfTheAuthorityMayCall) {
  Start(With(authority_, "server"));
  const absl::Status status = Call(With(authority_, "client"));
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(SecurityTest, OtherClientsAreRefusedBeforeGrpcHearsOfThem) {
  const TestAuthority foreign(directory_ / "foreign");
  foreign.Issue("client");
  authority_.Issue("expired", -60);
  Start(With(authority_, "server"));

  EXPECT_EQ(Call(WithoutCertificate()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Denials("certificate_missing") >= 1; }));
  EXPECT_EQ(Call(With(foreign, "client")).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Denials("certificate_refused") >= 1; }));
  const double refused = Denials("certificate_refused");
  EXPECT_EQ(Call(With(authority_, "expired")).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Denials("certificate_refused") > refused; }));
  EXPECT_EQ(Call(Plain()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Denials("not_tls") >= 1; }));

  EXPECT_EQ(
      server_->metrics()
          .Counter(metric::kRpcHandled, {"tandem.weights.v1.WeightService", "GetVersion", "OK"})
          .Value(),
      0);
  EXPECT_TRUE(Call(With(authority_, "client")).ok());
}

TEST_F(SecurityTest, AClientRefusesAServerOfAForeignAuthority) {
  const TestAuthority foreign(directory_ / "foreign");
  foreign.Issue("server");
  config::v1::ServerOptions options = With(foreign, "server");
  Start(options);
  EXPECT_EQ(Call(With(authority_, "client")).code(), absl::StatusCode::kUnavailable);
}

TEST_F(SecurityTest, AClientDoesNotSpeakPlainlyToAServerWithoutTls) {
  Start(Plain());
  EXPECT_EQ(Call(With(authority_, "client")).code(), absl::StatusCode::kUnavailable);
}

TEST_F(SecurityTest, NewCertificatesAreTakenWithoutARestart) {
  Start(With(authority_, "server"));
  const auto channel =
      MakeChannel(server_->address(), ToChannelOptions(With(authority_, "client")));
  ASSERT_TRUE(CallOver(channel).ok());
  const absl::Time expiry = server_->security().tls()->expiry();
  authority_.Issue("server", 7200);
  server_->security().Refresh();
  EXPECT_GT(server_->security().tls()->expiry(), expiry + absl::Minutes(30));
  // The connection that exists goes on, a new one gets the new certificate.
  EXPECT_TRUE(CallOver(channel).ok());
  EXPECT_TRUE(Call(With(authority_, "client")).ok());
}

TEST_F(SecurityTest, BadCertificatesLeaveTheEarlierOnesInUse) {
  Start(With(authority_, "server"));
  std::ofstream(authority_.certificate_file("server")) << "not a certificate";
  server_->security().Refresh();
  EXPECT_TRUE(Call(With(authority_, "client")).ok());
}

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(SecurityTest, AConnectionEndsWhenTheAuthorityOfItsClientIsWithdrawn) {
  const TestAuthority leaving(directory_ / "leaving", "leaving authority");
  leaving.Issue("client");
  const std::string ours = Contents(authority_.ca_file());
  config::v1::ServerOptions options = With(authority_, "server");
  options.mutable_tls()->set_ca_file(directory_ / "trusted");
  std::ofstream(options.tls().ca_file()) << ours << Contents(leaving.ca_file());
  Start(options);
  const auto stays = MakeChannel(server_->address(), ToChannelOptions(With(authority_, "client")));
  const auto leaves = MakeChannel(server_->address(), ToChannelOptions(With(leaving, "client")));
  ASSERT_TRUE(CallOver(stays).ok());
  ASSERT_TRUE(CallOver(leaves).ok());
  std::ofstream(options.tls().ca_file()) << ours;
  EXPECT_TRUE(server_->security().Refresh());
  server_->server().EndWithdrawn();
  auto& closed = server_->metrics().Counter(metric::kConnectionsClosed, {"credentials"});
  for (int i = 0; i < 3000 && closed.Value() == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(closed.Value(), 1);
  EXPECT_EQ(CallOver(leaves).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(CallOver(stays).ok());
}

TEST_F(SecurityTest, AConnectionEndsWhenTheCertificateOfItsClientExpires) {
  Start(With(authority_, "server"));
  authority_.Issue("brief", 2);
  const auto brief = MakeChannel(server_->address(), ToChannelOptions(With(authority_, "brief")));
  ASSERT_TRUE(CallOver(brief).ok());
  EXPECT_FALSE(server_->security().Refresh());
  auto& closed = server_->metrics().Counter(metric::kConnectionsClosed, {"credentials"});
  for (int i = 0; i < 3000 && closed.Value() == 0; ++i) {
    server_->server().EndWithdrawn();
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(closed.Value(), 1);
}

TEST_F(SecurityTest, AStreamEndsWhenItsTokenIsWithdrawn) {
  config::v1::ServerOptions options = Plain();
  options.mutable_tokens()->set_reader_file(TokenFile(kToken));
  Start(options);
  const auto channel = MakeChannel(server_->address(), ToChannelOptions(Plain()));
  grpc::reflection::v1::ServerReflectionRequest request;
  request.set_list_services("");
  RawCall call(channel, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
               {{kAuthorizationKey, absl::StrCat("Bearer ", kToken)}});
  call.Write(request.SerializeAsString());
  ASSERT_TRUE(call.Read().has_value());
  TokenFile("another-token-of-a-reader");
  EXPECT_TRUE(server_->security().Refresh());
  server_->server().EndWithdrawn();
  EXPECT_FALSE(call.Read().has_value());
  EXPECT_FALSE(call.Finish().ok());
}

TEST_F(SecurityTest, AKeyThatNoClientOfGrpcKnowsIsRefused) {
  authority_.Issue("edwards", 3600, "ED25519");
  const absl::Status status = ServerTls::Load(With(authority_, "edwards").tls()).status();
  EXPECT_EQ(FieldPath(status), "server.tls.certificate_file");
  EXPECT_THAT(std::string(status.message()), HasSubstr("neither RSA nor ECDSA"));
}

TEST_F(SecurityTest, AStartWithBadFilesNamesTheSetting) {
  Metrics metrics;
  const auto field = [&](const config::v1::ServerOptions& options) {
    return FieldPath(ServerSecurity::Load(options, metrics).status()).value_or("none");
  };
  authority_.Issue("other");
  authority_.Issue("expired", -60);
  config::v1::ServerOptions options = With(authority_, "server");
  EXPECT_EQ(field(options), "none");
  EXPECT_EQ(field(With(authority_, "expired")), "server.tls.certificate_file");
  options.mutable_tls()->set_private_key_file(authority_.private_key_file("other"));
  EXPECT_EQ(field(options), "server.tls.private_key_file");
  options = With(authority_, "server");
  options.mutable_tls()->set_ca_file((directory_ / "missing").string());
  EXPECT_EQ(field(options), "server.tls.ca_file");
  options.mutable_tls()->set_certificate_file((directory_ / "missing").string());
  EXPECT_EQ(field(options), "server.tls.certificate_file");
  options = WithoutCertificate();
  EXPECT_EQ(field(options), "none");
  options.mutable_tls()->set_ca_file((directory_ / "missing").string());
  EXPECT_EQ(field(options), "server.tls.ca_file");
}

TEST_F(SecurityTest, AServerShowsItsTokenToOthers) {
  config::v1::ServerOptions options = With(authority_, "server");
  options.mutable_tokens()->set_reader_file(TokenFile(kToken));
  Start(options);
  config::v1::ServerOptions client = With(authority_, "client");
  absl::Status status = Call(client);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(HasReason(status, reason::kTokenMissing));
  client.mutable_tokens()->set_own_file(options.tokens().reader_file());
  status = Call(client);
  EXPECT_TRUE(status.ok()) << status;
}

// Its certificate has the name of a service, not of the address at which a probe finds it.
TEST_F(SecurityTest, AServerReachesItself) {
  Start(With(authority_, "server"));
  const config::v1::ServerOptions own = With(authority_, "server");
  EXPECT_TRUE(
      CallOver(MakeChannel(server_->address(), ToChannelOptions(own, PeerIdentity::kOwnAddress)))
          .ok());
}

TEST_F(SecurityTest, MetricsWantTlsAndAToken) {
  config::v1::ServerOptions options = With(authority_, "server");
  options.mutable_tokens()->set_reader_file(TokenFile(kToken));
  Start(options);
  const int port = server_->server().metrics_port();
  httplib::SSLClient client("127.0.0.1", port, authority_.certificate_file("client"),
                            authority_.private_key_file("client"));
  client.set_ca_cert_path(authority_.ca_file());
  const auto denied = client.Get("/metrics");
  ASSERT_TRUE(denied) << httplib::to_string(denied.error());
  EXPECT_EQ(denied->status, 401);
  const auto metrics = client.Get("/metrics", {{"Authorization", std::string("Bearer ") + kToken}});
  ASSERT_TRUE(metrics);
  EXPECT_EQ(metrics->status, 200);
  EXPECT_THAT(metrics->body, HasSubstr("tandem_auth_denials_total{reason=\"token_missing\"} 1"));
  EXPECT_THAT(metrics->body, HasSubstr("tandem_certificate_expiry_timestamp_seconds"));

  EXPECT_FALSE(httplib::Client("127.0.0.1", port).Get("/metrics"));
  httplib::SSLClient stranger("127.0.0.1", port);
  stranger.set_ca_cert_path(authority_.ca_file());
  EXPECT_FALSE(stranger.Get("/metrics"));
}

// A TLS client of raw bytes.
class RawTlsClient {
 public:
  RawTlsClient(Socket socket, const TestAuthority& authority, const std::string& name)
      : socket_(std::move(socket)),
        context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free),
        tls_(nullptr, SSL_free) {
    SSL_CTX_use_certificate_file(context_.get(), authority.certificate_file(name).c_str(),
                                 SSL_FILETYPE_PEM);
    SSL_CTX_use_PrivateKey_file(context_.get(), authority.private_key_file(name).c_str(),
                                SSL_FILETYPE_PEM);
    tls_.reset(SSL_new(context_.get()));
    const unsigned char http2[] = {2, 'h', '2'};
    SSL_set_alpn_protos(tls_.get(), http2, sizeof(http2));
    SSL_set_fd(tls_.get(), socket_.get());
    EXPECT_EQ(SSL_connect(tls_.get()), 1);
  }
  // A record for each 16 KiB.
  void Send(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size(); sent += 16384) {
      const int size = static_cast<int>(std::min<size_t>(16384, bytes.size() - sent));
      EXPECT_EQ(SSL_write(tls_.get(), bytes.data() + sent, size), size);
    }
  }

 private:
  Socket socket_;
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context_;
  std::unique_ptr<SSL, void (*)(SSL*)> tls_;
};

// Nothing would wake the guard for bytes that OpenSSL holds while the socket is empty.
TEST_F(SecurityTest, AnEmptySocketLeavesNothingInsideOpenSsl) {
  const auto tls = ServerTls::Load(With(authority_, "server").tls());
  ASSERT_TRUE(tls.ok()) << tls.status();
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const int buffer_bytes = 4 << 20;
  setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
  fcntl(pair[0], F_SETFL, O_NONBLOCK);
  ClientStream stream(Socket(pair[0]), (*tls)->NewConnection(TlsProtocol::kHttp2));
  auto handshake = std::async(std::launch::async, [&] {
    ClientStream::Denial denial;
    while (stream.Handshake(&denial) == ClientStream::HandshakeState::kWaiting) {
    }
    return denial.message;
  });
  RawTlsClient client(Socket(pair[1]), authority_, "client");
  ASSERT_EQ(handshake.get(), "");
  const auto buffer = std::make_unique<std::array<char, ClientStream::kReadBytes>>();
  for (size_t size = 1; size < 120'000; size += 1999) {
    client.Send(std::string(size, 'x'));
    size_t received = 0;
    pollfd readable{.fd = stream.fd(), .events = POLLIN, .revents = 0};
    while (poll(&readable, 1, 0) > 0) {
      const ssize_t got = stream.Read(buffer->data(), buffer->size());
      if (got > 0) received += static_cast<size_t>(got);
    }
    ASSERT_EQ(received, size);
  }
}

TEST_F(SecurityTest, AClientThatDoesNotShakeHandsGivesWayToOthers) {
  Metrics metrics;
  const auto tls = ServerTls::Load(With(authority_, "server").tls());
  ASSERT_TRUE(tls.ok()) << tls.status();
  auto guard = ConnectionGuard::Listen("127.0.0.1", 0, metrics, tls->get(), {.max_connections = 2});
  ASSERT_TRUE(guard.ok()) << guard.status();
  std::atomic<int> served = 0;
  std::vector<Socket> servers;
  std::mutex mutex;
  (*guard)->Start([&](int fd) {
    std::lock_guard lock(mutex);
    servers.emplace_back(fd);
    ++served;
  });
  const auto channel = MakeChannel(absl::StrCat("127.0.0.1:", (*guard)->port()),
                                   ToChannelOptions(With(authority_, "client")));
  channel->GetState(/*try_to_connect=*/true);
  ASSERT_TRUE(Eventually([&] { return served == 1; }));
  const double closed = metrics.Counter(metric::kConnectionsClosed, {"connections"}).Value();
  std::vector<Socket> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(ConnectTo((*guard)->port()));
  EXPECT_TRUE(Eventually([&] {
    return metrics.Counter(metric::kConnectionsClosed, {"connections"}).Value() >= closed + 3;
  }));
  // The one that has shaken hands is still there: its server's end has no end of file.
  std::lock_guard lock(mutex);
  char byte = 0;
  while (recv(servers[0].get(), &byte, 1, MSG_DONTWAIT) > 0) {
  }
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(SecurityTest, MetricsRefuseBodiesRangesAndLongRequests) {
  Start(Plain());
  httplib::Client client("127.0.0.1", server_->server().metrics_port());
  EXPECT_EQ(client.Get("/metrics")->status, 200);
  EXPECT_EQ(client.Get("/metrics", {{"Range", "bytes=0-,0-,0-"}})->status, 405);
  EXPECT_EQ(client.Post("/metrics", std::string(1000, 'x'), "text/plain")->status, 405);
  const auto long_request = client.Get("/metrics", {{"A", std::string(7000, 'x')}});
  EXPECT_TRUE(!long_request || long_request->status == 400);
  EXPECT_EQ(client.Get("/metrics")->status, 200);
}

TEST_F(SecurityTest, MetricsAreServedBesideClientsThatSendSlowly) {
  Start(With(authority_, "server"));
  const int port = server_->server().metrics_port();
  std::vector<Socket> slow;
  for (int i = 0; i < 12; ++i) slow.push_back(ConnectTo(port));
  std::atomic<bool> done = false;
  std::thread trickle([&] {
    while (!done) {
      for (const Socket& socket : slow) (void)!send(socket.get(), "\x16", 1, MSG_NOSIGNAL);
      absl::SleepFor(absl::Milliseconds(300));
    }
  });
  httplib::SSLClient client("127.0.0.1", port, authority_.certificate_file("client"),
                            authority_.private_key_file("client"));
  client.set_ca_cert_path(authority_.ca_file());
  client.set_connection_timeout(30);
  client.set_read_timeout(30);
  const auto metrics = client.Get("/metrics");
  done = true;
  trickle.join();
  ASSERT_TRUE(metrics) << httplib::to_string(metrics.error());
  EXPECT_EQ(metrics->status, 200);
}

TEST_F(SecurityTest, MetricsTakeNewCertificates) {
  Start(With(authority_, "server"));
  authority_.Issue("server", 7200);
  server_->security().Refresh();
  httplib::SSLClient client("127.0.0.1", server_->server().metrics_port(),
                            authority_.certificate_file("client"),
                            authority_.private_key_file("client"));
  client.set_ca_cert_path(authority_.ca_file());
  const auto metrics = client.Get("/metrics");
  ASSERT_TRUE(metrics) << httplib::to_string(metrics.error());
  EXPECT_EQ(metrics->status, 200);
}

}  // namespace
}  // namespace tandem::rpc
