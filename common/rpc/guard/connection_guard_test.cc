// The guard between raw sockets: clients over TCP, and the ends that gRPC would get.
#include "common/rpc/guard/connection_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/rpc/metrics/metrics.h"
#include "common/rpc/testing/http2_frames.h"
#include "common/rpc/testing/server.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;

// A socket whose reads give up after 20 s.
class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Peer() { Close(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  void Send(const std::string& bytes) {
    (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // `size` bytes, or fewer at the end of the connection.
  std::string Receive(size_t size) {
    std::string bytes(size, '\0');
    size_t got = 0;
    while (got < size) {
      const ssize_t n = recv(fd_, bytes.data() + got, size - got, 0);
      if (n <= 0) break;
      got += static_cast<size_t>(n);
    }
    bytes.resize(got);
    return bytes;
  }
  // Everything up to the end of the connection.
  std::string ReceiveAll() { return Receive(1 << 20); }

 private:
  int fd_;
};

class ConnectionGuardTest : public testing::Test {
 protected:
  void Start(const ConnectionLimits& limits) {
    auto guard = ConnectionGuard::Listen("127.0.0.1", 0, metrics_, /*tls=*/nullptr, limits);
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
    guard_->Start([this](int fd) {
      std::lock_guard lock(mutex_);
      served_.push_back(fd);
    });
  }
  ~ConnectionGuardTest() override {
    servers_.clear();
    guard_.reset();
    for (const int fd : served_) close(fd);
  }

  // A connection, once the guard has accepted it: `server` is the end that gRPC would get.
  struct Pair {
    std::unique_ptr<Peer> client;
    Peer* server;
  };
  Pair Connect(uint32_t from = INADDR_LOOPBACK) {
    Pair pair{std::make_unique<Peer>(Dial(from)), nullptr};
    EXPECT_TRUE(Eventually([&] {
      std::lock_guard lock(mutex_);
      return !served_.empty();
    }));
    std::lock_guard lock(mutex_);
    if (served_.empty()) return pair;
    // A blocking socket makes the tests simple.
    servers_.push_back(std::make_unique<Peer>(Blocking(served_.back())));
    served_.clear();
    pair.server = servers_.back().get();
    pair.client->Send(kHttp2Preface);
    EXPECT_EQ(pair.server->Receive(24), kHttp2Preface);
    return pair;
  }

  // A connected socket of a client with the address `from`.
  int Dial(uint32_t from = INADDR_LOOPBACK) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in source{};
    source.sin_family = AF_INET;
    source.sin_addr.s_addr = htonl(from);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&source), sizeof(source)), 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(guard_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  static int Blocking(int fd) {
    int off = 0;
    ioctl(fd, FIONBIO, &off);
    return fd;
  }

  std::mutex mutex_;
  std::vector<int> served_;
  std::vector<std::unique_ptr<Peer>> servers_;
  Metrics metrics_;
  std::unique_ptr<ConnectionGuard> guard_;
};

TEST_F(ConnectionGuardTest, PassesEveryByteOnInBothDirections) {
  Start({});
  Pair pair = Connect();
  // More than the sockets' buffers hold.
  const std::string bytes =
      Frame(kHeadersFrame, 0, 1) + Frame(kDataFrame, 0, 1, Message(8 << 20, (8 << 20) - 5));
  std::thread sender([&] { pair.client->Send(bytes); });
  EXPECT_EQ(pair.server->Receive(bytes.size()) == bytes, true);
  sender.join();
  sender = std::thread([&] { pair.server->Send(bytes); });
  EXPECT_EQ(pair.client->Receive(bytes.size()) == bytes, true);
  sender.join();
}

TEST_F(ConnectionGuardTest, TheEndOfOneSideReachesTheOther) {
  Start({});
  Pair pair = Connect();
  pair.client->Close();
  EXPECT_EQ(pair.server->ReceiveAll(), "");
  Pair other = Connect();
  other.server->Send("last words");
  other.server->Close();
  EXPECT_EQ(other.client->ReceiveAll(), "last words");
}

TEST_F(ConnectionGuardTest, TooManyResetsCloseTheConnection) {
  Start({.max_resets = 10});
  Pair pair = Connect();
  for (uint32_t stream = 1; stream < 41; stream += 2) {
    pair.client->Send(Frame(kHeadersFrame, 0, stream) + Frame(kResetFrame, 0, stream, Bytes(8, 4)));
  }
  EXPECT_THAT(pair.client->ReceiveAll(), HasSubstr("too many calls were reset"));
  EXPECT_EQ(metrics_.Counter(metric::kConnectionsClosed, {"resets"}).Value(), 1);
  EXPECT_LE(pair.server->ReceiveAll().size(), 11 * 22u);
}

TEST_F(ConnectionGuardTest, ResetsOfAllConnectionsWait) {
  Start({.max_resets = 1000, .max_resets_per_second = 10});
  Pair pair = Connect();
  // One write, which is passed on as a whole; what comes after it has to wait two seconds.
  std::string resets;
  for (uint32_t stream = 1; stream < 61; stream += 2) {
    resets += Frame(kHeadersFrame, 0, stream) + Frame(kResetFrame, 0, stream, Bytes(8, 4));
  }
  pair.client->Send(resets);
  EXPECT_EQ(pair.server->Receive(resets.size()), resets);
  pair.client->Send("later");
  Pair other = Connect();  // is not held back, and comes first
  other.client->Send("now");
  EXPECT_EQ(other.server->Receive(3), "now");
  EXPECT_EQ(pair.server->Receive(5), "later");
}

TEST_F(ConnectionGuardTest, UnfinishedMessagesCloseTheConnectionThatHoldsMost) {
  Start({.max_unfinished_bytes = 1000});
  Pair small = Connect();
  small.client->Send(Frame(kHeadersFrame, 0, 1) + Frame(kDataFrame, 0, 1, Message(2000, 200)));
  EXPECT_EQ(small.server->Receive(9 + 9 + 205).size(), 9u + 9u + 205u);
  Pair large = Connect();
  large.client->Send(Frame(kHeadersFrame, 0, 1) + Frame(kDataFrame, 0, 1, Message(2000, 900)));
  EXPECT_THAT(large.client->ReceiveAll(), HasSubstr("incomplete messages take more than"));
  small.client->Send("x");
  EXPECT_EQ(small.server->Receive(1), "x");
}

TEST_F(ConnectionGuardTest, TooManyStreamsCloseTheConnectionThatHasMost) {
  Start({.max_open_streams = 4});
  Pair few = Connect();
  few.client->Send(Frame(kHeadersFrame, 0, 1));
  EXPECT_EQ(few.server->Receive(9).size(), 9u);
  Pair many = Connect();
  for (uint32_t stream = 1; stream < 9; stream += 2) {
    many.client->Send(Frame(kHeadersFrame, 0, stream));
  }
  EXPECT_THAT(many.client->ReceiveAll(), HasSubstr("open streams"));
  few.client->Send("x");
  EXPECT_EQ(few.server->Receive(1), "x");
}

TEST_F(ConnectionGuardTest, AConnectionTooManyReplacesOneWithoutACall) {
  Start({.max_connections = 2});
  Pair busy = Connect();
  busy.client->Send(Frame(kHeadersFrame, 0, 1));
  EXPECT_EQ(busy.server->Receive(9).size(), 9u);
  Pair idle = Connect();
  Pair newest = Connect();
  EXPECT_THAT(idle.client->ReceiveAll(), HasSubstr("reached its connection limit"));
  for (Pair* pair : {&busy, &newest}) {
    pair->client->Send("x");
    EXPECT_EQ(pair->server->Receive(1), "x");
  }
}

TEST_F(ConnectionGuardTest, AConnectionTooManyReplacesOneOfTheAddressThatHasMost) {
  constexpr uint32_t kFirst = INADDR_LOOPBACK + 1;
  constexpr uint32_t kSecond = INADDR_LOOPBACK + 2;
  Start({.max_connections = 3});
  const auto call = [](Pair& pair) {
    pair.client->Send(Frame(kHeadersFrame, 0, 1));
    EXPECT_EQ(pair.server->Receive(9).size(), 9u);
  };
  Pair older = Connect(kFirst);
  call(older);
  Pair newer = Connect(kFirst);
  call(newer);
  Pair idle = Connect(kSecond);
  // The address with most connections gives one up although that one has a call, not the other,
  // whose connection has none.
  Pair newcomer = Connect();
  EXPECT_THAT(newer.client->ReceiveAll(), HasSubstr("most connections are from this address"));
  for (Pair* pair : {&older, &idle, &newcomer}) {
    pair->client->Send("x");
    EXPECT_EQ(pair->server->Receive(1), "x");
  }
}

TEST_F(ConnectionGuardTest, TooManyPingsCloseTheConnection) {
  Start({.max_control_frames = 10});
  Pair pair = Connect();
  const std::string ping = Frame(kPingFrame, 0, 0, std::string(8, '\0'));
  for (int i = 0; i < 10; ++i) pair.client->Send(ping);
  EXPECT_EQ(pair.server->Receive(10 * ping.size()).size(), 10 * ping.size());
  for (int i = 0; i < 3; ++i) pair.client->Send(ping);
  EXPECT_THAT(pair.client->ReceiveAll(), HasSubstr("PING and SETTINGS frames"));
}

TEST_F(ConnectionGuardTest, TooManyCallsOfOneConnectionCloseItBeforeTheServerSeesThem) {
  Start({.max_connection_streams = 2});
  Pair pair = Connect();
  pair.client->Send(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, 0, 3) +
                    Frame(kHeadersFrame, 0, 5));
  const std::string said = pair.client->ReceiveAll();
  EXPECT_THAT(said, HasSubstr("more than 2 calls at once"));
  EXPECT_EQ(said.substr(0, 9), Frame(kSettingsFrame, 0, 0)) << "a server begins with its settings";
  EXPECT_EQ(pair.server->ReceiveAll(), "");
}

TEST_F(ConnectionGuardTest, AnAddressThatComesAndGoesTooOftenIsRefusedForAWhile) {
  Start({.max_churn = 4});
  {
    Pair pair = Connect();
    for (uint32_t id = 1; id < 8; id += 2) pair.client->Send(Frame(kHeadersFrame, 0, id));
    EXPECT_EQ(pair.server->Receive(4 * 9).size(), 4u * 9);
    pair.client->Close();
    EXPECT_EQ(pair.server->ReceiveAll(), "");
    pair.server->Close();  // as gRPC does then
  }
  Pair other = Connect(INADDR_LOOPBACK + 1);
  other.client->Send("x");
  EXPECT_EQ(other.server->Receive(1), "x");
  Peer refused(Dial());
  EXPECT_THAT(refused.ReceiveAll(), HasSubstr("from this address"));
  // Two connections come back every second.
  EXPECT_TRUE(Eventually([&] {
    Peer again(Dial());
    again.Send(kHttp2Preface);
    std::lock_guard lock(mutex_);
    return !served_.empty();
  }));
}

TEST_F(ConnectionGuardTest, APortInUseIsUnavailable) {
  Start({});
  EXPECT_EQ(ConnectionGuard::Listen("127.0.0.1", guard_->port(), metrics_).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tandem::rpc
