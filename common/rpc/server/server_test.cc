// The skeleton over a real in-process server with a fake service.
#include "common/rpc/server/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/message_size.h"
#include "common/rpc/testing/fake_weight_service.h"
#include "common/rpc/testing/raw_call.h"
#include "common/rpc/testing/server.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;
using weights::v1::GetVersionRequest;
using weights::v1::GetVersionResponse;
using weights::v1::WeightService;

constexpr char kService[] = "tandem.weights.v1.WeightService";
constexpr int kServing = 1;
constexpr int kNotServing = 2;

struct Health {
  absl::StatusCode code;
  int status;
};
Health CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  RawCall call(channel, "/grpc.health.v1.Health/Check");
  call.Write(request.SerializeAsString());
  call.WritesDone();
  grpc::health::v1::HealthCheckResponse response;
  EXPECT_TRUE(response.ParseFromString(call.Read().value_or("")));
  return {call.Finish().code(), response.status()};
}

int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// "" when nothing comes for as long as Prometheus waits.
std::string HttpGet(int port, const std::string& path) {
  const int fd = ConnectTo(port);
  const timeval patience{.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  (void)!write(fd, request.data(), request.size());
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  return text;
}

class ServerTest : public testing::Test {
 protected:
  using Result = absl::StatusOr<GetVersionResponse>;

  struct Answer {
    absl::Status status;
    GetVersionResponse response;
    std::string request_id;
  };
  Answer Call(const std::string& request_id = "", absl::Duration timeout = absl::Seconds(20)) {
    auto context = MakeClientContext(SteadyTime::Now() + timeout, request_id);
    Answer answer;
    answer.status =
        FromGrpcStatus(stub_->GetVersion(context.get(), GetVersionRequest(), &answer.response));
    const auto& trailing = context->GetServerTrailingMetadata();
    if (const auto found = trailing.find("x-request-id"); found != trailing.end()) {
      answer.request_id.assign(found->second.data(), found->second.size());
    }
    return answer;
  }
  std::string Scrape() { return HttpGet(server_.server().metrics_port(), "/metrics"); }

  std::function<Result(const CallScope&)> handler_ = [](const CallScope&) -> Result {
    GetVersionResponse response;
    response.mutable_weights()->set_version(42);
    return response;
  };
  TestServer server_{[this](ServerRuntime& runtime) {
    return std::make_unique<FakeApp>(
        runtime,
        [this](const GetVersionRequest&, const CallScope& context) { return handler_(context); });
  }};
  std::unique_ptr<WeightService::Stub> stub_ = WeightService::NewStub(server_.channel());
};

TEST_F(ServerTest, AnswersAUnaryCall) {
  const Answer answer = Call();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.response.weights().version(), 42);
}

TEST_F(ServerTest, HealthIsPerServiceName) {
  const auto channel = server_.channel();
  EXPECT_EQ(CheckHealth(channel, kService).status, kServing);
  EXPECT_EQ(CheckHealth(channel, "").status, kServing);
  EXPECT_EQ(CheckHealth(channel, "no.such.Service").code, absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckHealth(channel, kLivenessService).status, kServing);
  server_.server().SetServing(false);
  EXPECT_EQ(CheckHealth(channel, kService).status, kNotServing);
  EXPECT_EQ(CheckHealth(channel, "").status, kNotServing);
  // Not ready, and alive.
  EXPECT_EQ(CheckHealth(channel, kLivenessService).status, kServing);
}

TEST_F(ServerTest, TheGateRefusesWhileLoadingAndDraining) {
  server_.executor().SetGate(CallExecutor::Gate::kLoading);
  absl::Status status = Call().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Reason(status), "LOADING");
  EXPECT_TRUE(RetryAfterMilliseconds(status).has_value());
  server_.executor().SetGate(CallExecutor::Gate::kDraining);
  EXPECT_EQ(Reason(Call().status), "DRAINING");
}

TEST_F(ServerTest, ErrorsArriveWithTheirDetails) {
  handler_ = [](const CallScope&) -> Result { return InvalidField("a[3].b", "bad"); };
  const absl::Status status = Call().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "a[3].b");
}

TEST_F(ServerTest, ExceptionsAreInternalAndTheServerServesOn) {
  handler_ = [](const CallScope&) -> Result { throw std::runtime_error("boom"); };
  EXPECT_EQ(Call().status, absl::InternalError("handler: boom"));
  handler_ = [](const CallScope&) -> Result { return GetVersionResponse(); };
  EXPECT_TRUE(Call().status.ok());
}

TEST_F(ServerTest, RequestIdsAreEchoedOrMade) {
  std::string seen;
  handler_ = [&](const CallScope& context) -> Result {
    seen = context.request_id;
    return GetVersionResponse();
  };
  EXPECT_EQ(Call("my-id").request_id, "my-id");
  EXPECT_EQ(seen, "my-id");
  const std::string made = Call().request_id;
  EXPECT_EQ(made.size(), 32u);
  EXPECT_EQ(seen, made);
  EXPECT_NE(Call().request_id, made);
  EXPECT_EQ(Call(std::string(500, 'x')).request_id.size(), 32u) << "a huge id is replaced";
}

TEST_F(ServerTest, TheClientsDeadlineFreesTheCall) {
  std::promise<void> cancelled;
  handler_ = [&](const CallScope& context) -> Result {
    EXPECT_LT(context.deadline, SteadyTime::Now() + absl::Seconds(5));
    EXPECT_TRUE(Eventually([&] { return context.cancelled(); }));
    cancelled.set_value();
    return GetVersionResponse();
  };
  EXPECT_EQ(Call("", absl::Milliseconds(100)).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cancelled.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
}

TEST_F(ServerTest, AFullQueueIsResourceExhausted) {
  // Queued work may run after this function has returned: it shares what it waits for.
  struct Shared {
    std::latch go{1};
    std::atomic<int> started = 0;
  };
  const auto shared = std::make_shared<Shared>();
  const auto block = [shared] {
    ++shared->started;
    shared->go.wait();
  };
  // Occupies the workers, then the queue.
  const int workers = CallExecutorOptions().num_threads;
  for (int i = 0; i < workers; ++i) ASSERT_TRUE(server_.executor().Run(block).ok());
  ASSERT_TRUE(Eventually([&] { return shared->started == workers; }));
  while (server_.executor().Run(block).ok()) {
  }
  const absl::Status refused = Call().status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(refused).has_value());
  shared->go.count_down();
  EXPECT_TRUE(Eventually([&] { return Call().status.ok(); }));
}

TEST_F(ServerTest, MetricsCountEveryCallByCode) {
  ASSERT_TRUE(Call().status.ok());
  handler_ = [](const CallScope&) -> Result { return absl::NotFoundError("x"); };
  (void)Call();
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
  const std::string text = Scrape();
  EXPECT_THAT(text,
              HasSubstr("grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"GetVersion\","
                        "grpc_service=\"tandem.weights.v1.WeightService\"} 1"));
  EXPECT_THAT(text,
              HasSubstr("grpc_server_handled_total{grpc_code=\"NOT_FOUND\",grpc_method="
                        "\"GetVersion\",grpc_service=\"tandem.weights.v1.WeightService\"} 1"));
  EXPECT_THAT(text, HasSubstr("grpc_server_handling_seconds_count{grpc_method=\"GetVersion\","
                              "grpc_service=\"tandem.weights.v1.WeightService\"} 2"));
  EXPECT_THAT(text, HasSubstr("grpc_server_live_calls{grpc_method=\"GetVersion\",grpc_service="
                              "\"tandem.weights.v1.WeightService\"} 0"));
  EXPECT_THAT(text, HasSubstr("tandem_server_ready 1"));
}

TEST_F(ServerTest, EveryCodeIsCountedFromZero) {
  const std::string text = Scrape();
  for (const char* code :
       {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "DATA_LOSS", "UNAUTHENTICATED"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("grpc_server_handled_total{grpc_code=\"", code,
                                             "\",grpc_method=\"GetVersion\",grpc_service="
                                             "\"tandem.weights.v1.WeightService\"} 0")));
  }
}

TEST_F(ServerTest, ReflectionListsTheServices) {
  grpc::reflection::v1::ServerReflectionRequest request;
  request.set_list_services("");
  for (const std::string& service : ReflectionService::Names()) {
    RawCall call(server_.channel(), absl::StrCat("/", service, "/ServerReflectionInfo"));
    call.Write(request.SerializeAsString());
    grpc::reflection::v1::ServerReflectionResponse response;
    ASSERT_TRUE(response.ParseFromString(call.Read().value_or("")));
    std::vector<std::string> names;
    for (const auto& entry : response.list_services_response().service()) {
      names.push_back(entry.name());
    }
    EXPECT_THAT(names, UnorderedElementsAre(kService, "grpc.health.v1.Health",
                                            "grpc.reflection.v1.ServerReflection",
                                            "grpc.reflection.v1alpha.ServerReflection"));
  }
}

TEST_F(ServerTest, NamesThatAClientMakesUpAreNoMetrics) {
  for (const char* path : {"/made.up.Service/Method", "/tandem.weights.v1.WeightService/MadeUp",
                           "/grpc.health.v1.Health/MadeUp"}) {
    RawCall call(server_.channel(), path);
    EXPECT_EQ(call.Finish().code(), absl::StatusCode::kUnimplemented) << path;
  }
  EXPECT_EQ(CheckHealth(server_.channel(), "").status, kServing);
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
  const std::string text = Scrape();
  EXPECT_THAT(text, Not(HasSubstr("made.up")));
  EXPECT_THAT(text, Not(HasSubstr("MadeUp")));
  EXPECT_THAT(text, HasSubstr("grpc_method=\"unknown\",grpc_service=\"unknown\"} 3"));
  EXPECT_THAT(text, HasSubstr("grpc_method=\"Check\",grpc_service=\"grpc.health.v1.Health\"} 1"));
}

TEST_F(ServerTest, EveryRefusalHasAText) {
  RawCall garbage(server_.channel(), "/tandem.weights.v1.WeightService/GetVersion");
  garbage.Write("\xff\xff\xff\xff");
  garbage.WritesDone();
  absl::Status status = garbage.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tandem.weights.v1.GetVersionRequest"));
  RawCall unknown(server_.channel(), "/made.up.Service/Method");
  status = unknown.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/made.up.Service/Method"));
}

TEST_F(ServerTest, SilentConnectionsDoNotStopAScrape) {
  std::vector<int> silent;
  for (int i = 0; i < 16; ++i) silent.push_back(ConnectTo(server_.server().metrics_port()));
  EXPECT_THAT(Scrape(), HasSubstr("tandem_server_ready 1"));
  for (const int fd : silent) close(fd);
}

TEST_F(ServerTest, MessagesAboveTheLimitAreRefused) {
  grpc::ClientContext context;
  weights::v1::CommitUpdateRequest request;
  request.set_update_id(std::string(kMaxReceiveBytes + 1, 'x'));
  weights::v1::CommitUpdateResponse response;
  EXPECT_EQ(stub_->CommitUpdate(&context, request, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Call().status.ok());
}

TEST_F(ServerTest, APortInUseIsAClearError) {
  config::v1::RolloutServerConfig config;
  config.mutable_senior()->set_model("unused");
  config.mutable_server()->set_grpc_port(server_.server().grpc_port());
  config.mutable_server()->set_metrics_port(0);
  ASSERT_TRUE(config::Resolve(&config).ok());
  Metrics metrics;
  const ServerSecurity security(metrics);
  auto second = Server::Start(config.server(), {}, server_.executor(), security, &metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("server.grpc_port"));

  config.mutable_server()->set_grpc_port(0);
  config.mutable_server()->set_metrics_port(server_.server().metrics_port());
  second = Server::Start(config.server(), {}, server_.executor(), security, &metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("server.metrics_port"));
}

TEST_F(ServerTest, ShutdownWaitsForRunningCallsUntilTheDeadline) {
  std::latch started(1);
  handler_ = [&](const CallScope&) -> Result {
    started.count_down();
    absl::SleepFor(absl::Milliseconds(300));
    GetVersionResponse response;
    response.mutable_weights()->set_version(7);
    return response;
  };
  Answer answer;
  std::thread client([&] { answer = Call(); });
  started.wait();
  server_.server().Shutdown(SteadyTime::Now() + absl::Seconds(20));
  client.join();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.response.weights().version(), 7);
}

TEST_F(ServerTest, ShutdownCancelsWhatIsLeftAtTheDeadline) {
  std::latch started(1);
  std::promise<void> released;
  handler_ = [&](const CallScope& context) -> Result {
    started.count_down();
    EXPECT_TRUE(Eventually([&] { return context.cancelled(); }));
    released.set_value();
    return GetVersionResponse();
  };
  Answer answer;
  std::thread client([&] { answer = Call(); });
  started.wait();
  server_.server().Shutdown(SteadyTime::Now() + absl::Milliseconds(100));
  client.join();
  EXPECT_FALSE(answer.status.ok());
  EXPECT_EQ(released.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

TEST(DefaultDeadlineTest, BoundsACallWithoutOne) {
  Metrics metrics;
  const ServerSecurity security(metrics);
  CallExecutor executor({.default_deadline = absl::Milliseconds(100),
                         .streams = {.patience = absl::Milliseconds(100)}});
  ServerRuntime runtime{.executor = executor, .metrics = metrics, .start_time = SteadyTime::Now()};
  std::latch go(1);
  FakeApp app(runtime,
              [&](const GetVersionRequest&,
                  const CallScope& context) -> absl::StatusOr<GetVersionResponse> {
                EXPECT_NE(context.deadline, SteadyTime::InfiniteFuture());
                go.wait();
                return GetVersionResponse();
              });
  config::v1::RolloutServerConfig config;
  config.mutable_senior()->set_model("unused");
  config.mutable_server()->set_grpc_port(0);
  config.mutable_server()->set_metrics_port(0);
  ASSERT_TRUE(config::Resolve(&config).ok());
  auto server = Server::Start(config.server(), app.services(), executor, security, &metrics);
  ASSERT_TRUE(server.ok());
  executor.SetGate(CallExecutor::Gate::kOpen);
  auto stub =
      WeightService::NewStub(TestChannel(absl::StrCat("127.0.0.1:", (*server)->grpc_port())));
  grpc::ClientContext context;
  GetVersionResponse response;
  EXPECT_EQ(stub->GetVersion(&context, GetVersionRequest(), &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  go.count_down();
}

}  // namespace
}  // namespace tandem::rpc
