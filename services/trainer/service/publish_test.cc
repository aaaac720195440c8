#include "services/trainer/service/publish.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/transfer/weight_receiver_service.h"
#include "common/weights/staged_weight_receiver.h"
#include "common/weights/testing/told_weights.h"
#include "services/trainer/service/testing/fixture.h"

namespace tandem::trainer {
namespace {

using testing::HasSubstr;

class ReceiverApp final : public rpc::ServerApp {
 public:
  ReceiverApp(rpc::ServerRuntime& runtime, WeightReceiver* receiver)
      : service_(runtime.executor, runtime.metrics) {
    service_.SetReceiver(receiver);
  }
  std::vector<rpc::NamedService> services() override {
    return {{weights::v1::WeightService::service_full_name(), &service_}};
  }
  absl::Status Load() override { return absl::OkStatus(); }

 private:
  rpc::WeightReceiverService service_;
};

// A receiver whose commits return the status of `apply`.
struct ReceiverServer {
  explicit ReceiverServer(absl::Status apply = absl::OkStatus(), int64_t version = -1,
                          std::vector<ReceivedComponent> components = {},
                          DType type = DType::kFloat32,
                          StagedWeightReceiver::OpenGpu open_gpu = nullptr)
      : receiver({{.name = "w", .dtype = type, .shape = {((2 << 20) + 40) / 4}}}, std::nullopt,
                 /*num_token_ids=*/0, {.version = version, .digest = ""}, Tell(told),
                 std::move(components), /*allow_not_finite=*/false, {}, std::move(open_gpu)) {
    told.apply_status = std::move(apply);
  }

  Told told;
  StagedWeightReceiver receiver;
  rpc::TestServer server{[this](rpc::ServerRuntime& runtime) {
    return std::make_unique<ReceiverApp>(runtime, &receiver);
  }};
};

class PublishTest : public TrainerServerTest {
 protected:
  absl::StatusOr<v1::PublishWeightsResponse> Publish(const std::vector<std::string>& targets,
                                                     bool allow_rollback = false) {
    v1::PublishWeightsRequest request;
    request.set_allow_rollback(allow_rollback);
    *request.mutable_targets() = {targets.begin(), targets.end()};
    return Call<v1::PublishWeightsResponse>(&v1::TrainerService::Stub::PublishWeights, request);
  }
};

TEST_F(PublishTest, EveryReceiverServesTheWeights) {
  ReceiverServer a, b;
  const auto response = Publish({a.server.address(), b.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->weights().version(), 0);
  EXPECT_EQ(response->bytes(), (2 << 20) + 40);
  ASSERT_EQ(response->results_size(), 2);
  EXPECT_EQ(response->results(0).target(), a.server.address());
  EXPECT_EQ(response->results(1).target(), b.server.address());
  for (const auto& result : response->results()) {
    EXPECT_EQ(result.status().code(), 0) << result.status().message();
    EXPECT_EQ(result.digest(), response->weights().digest());
  }
  EXPECT_EQ(a.receiver.Version().digest, response->weights().digest());
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weight_bytes_sent_total 4194384"));
}

TEST_F(PublishTest, TheSnapshotHasTheTypesThatTheReceiversWant) {
  ReceiverServer wide, rounds(absl::OkStatus(), -1, {}, DType::kBFloat16),
      rounds_too(absl::OkStatus(), -1, {}, DType::kBFloat16);
  auto response = Publish({rounds.server.address(), rounds_too.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  const TensorTypes narrow = {{"w", DType::kBFloat16}};
  EXPECT_THAT(engine_->asked_types(), testing::ElementsAre(narrow));
  EXPECT_EQ(response->bytes(), (2 << 20) + 40);
  for (const ReceiverServer* receiver : {&rounds, &rounds_too}) {
    EXPECT_EQ(receiver->told.applied.size(), (2 << 20) / 2 + 20);
    EXPECT_EQ(receiver->receiver.Version().digest, response->weights().digest());
  }
  for (const auto& result : response->results()) {
    EXPECT_EQ(result.bytes(), (2 << 20) / 2 + 20) << result.status().message();
  }
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weight_bytes_sent_total 2097192"));

  response = Publish({wide.server.address(), rounds.server.address()}, /*allow_rollback=*/true);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(engine_->asked_types(), testing::ElementsAre(TensorTypes(), narrow));
  EXPECT_EQ(response->results(0).bytes(), (2 << 20) + 40);
  EXPECT_EQ(response->results(1).bytes(), 0) << "it serves the weights";
  EXPECT_EQ(wide.told.applied.size(), (2 << 20) + 40);

  const std::string dead = wide.server.address();
  wide.server.Stop();
  response = Publish({dead, rounds.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(engine_->asked_types(), testing::ElementsAre(narrow));
  EXPECT_EQ(response->results(0).status().code(), static_cast<int>(grpc::UNAVAILABLE));
}

// In another container, CUDA may refuse memory of a process on the same machine.
TEST_F(PublishTest, WithoutAReaderOfTheGpusMemoryTheNextCopyIsInAFile) {
  ReceiverServer plain,
      refuses(absl::OkStatus(), -1, {}, DType::kFloat32, [](absl::Span<const GpuMemory>) {
        return absl::FailedPreconditionError("another container");
      });
  ASSERT_TRUE(Publish({plain.server.address()}).ok());
  for (int round = 0; round < 2; ++round) {
    const auto response = Publish({refuses.server.address()}, /*allow_rollback=*/true);
    ASSERT_TRUE(response.ok()) << response.status();
    EXPECT_EQ(response->results(0).status().code(), 0) << response->results(0).status().message();
    EXPECT_EQ(refuses.receiver.Version().digest, response->weights().digest());
    ASSERT_TRUE(engine_->LoadCheckpoint({}, {}).ok()) << "which brings other weights";
  }
  EXPECT_THAT(engine_->asked_on_gpu(), testing::ElementsAre(false, true, false));
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weight_bytes_sent_total 6291576"));
}

TEST_F(PublishTest, TheGpusMemoryIsUsedWhereAllTargetsReadIt) {
  const std::string bytes = [&] {
    const FakeWeights weights(0, (2 << 20) + 40, 0);
    std::string read((2 << 20) + 40, ' ');
    EXPECT_TRUE(weights.Read(0, {reinterpret_cast<std::byte*>(read.data()), read.size()}).ok());
    return read;
  }();
  ReceiverServer plain,
      reads(absl::OkStatus(), -1, {}, DType::kFloat32, [&](absl::Span<const GpuMemory>) {
        return std::make_shared<const FakeGpuMemory>(bytes);
      });
  ASSERT_TRUE(Publish({reads.server.address()}).ok());
  EXPECT_EQ(reads.told.shared, 1);
  ASSERT_TRUE(Publish({plain.server.address(), reads.server.address()}).ok());
  EXPECT_THAT(engine_->asked_on_gpu(), testing::ElementsAre(true, false));
  EXPECT_EQ(plain.told.shared, 0);
  EXPECT_EQ(plain.receiver.Version(), reads.receiver.Version());
}

TEST_F(PublishTest, AReceiverThatFailsLeavesTheGpusMemoryInUse) {
  ReceiverServer fails(absl::InternalError("no memory"), -1, {}, DType::kFloat32,
                       [](absl::Span<const GpuMemory>) {
                         return absl::FailedPreconditionError("another container");
                       });
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Publish({fails.server.address()}, true).ok());
    ASSERT_TRUE(engine_->LoadCheckpoint({}, {}).ok()) << "which brings other weights";
  }
  EXPECT_THAT(engine_->asked_on_gpu(), testing::ElementsAre(true, true));
}

TEST_F(PublishTest, OneDeadReceiverDoesNotConcernTheOthers) {
  ReceiverServer alive, dead, refusing(absl::InternalError("no memory"));
  const std::string dead_address = dead.server.address();
  dead.server.Stop();
  const auto response = Publish({dead_address, alive.server.address(), refusing.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->results(0).status().code(), static_cast<int>(grpc::UNAVAILABLE));
  EXPECT_EQ(response->results(0).digest(), "");
  EXPECT_EQ(response->results(1).status().code(), 0);
  EXPECT_EQ(response->results(2).status().code(), static_cast<int>(grpc::INTERNAL));
  EXPECT_EQ(alive.receiver.Version().digest, response->weights().digest());
  EXPECT_THAT(server_.metrics().Text(),
              HasSubstr("tandem_weight_publications_total{result=\"failed\"} 2"));
}

TEST_F(PublishTest, ARepeatSendsNothing) {
  ReceiverServer a;
  ASSERT_TRUE(Publish({a.server.address()}).ok());
  const auto repeat = Publish({a.server.address()});
  ASSERT_TRUE(repeat.ok());
  EXPECT_EQ(repeat->results(0).status().code(), 0) << repeat->results(0).status().message();
  EXPECT_EQ(repeat->results(0).digest(), repeat->weights().digest());
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weight_bytes_sent_total 2097192"));
}

TEST_F(PublishTest, EveryReceiverIsAskedWhetherItTakesTheSpeculator) {
  engine_->AddSpeculator(80);
  const auto with_parameter = [](int64_t elements) {
    return std::vector<ReceivedComponent>{
        {.name = kSpeculatorComponent,
         .config = "{}",
         .parameters = {{.name = "speculator.h", .shape = {elements}}},
         .initial = {.version = -1, .digest = ""}}};
  };
  ReceiverServer with(absl::OkStatus(), -1, with_parameter(20)), without,
      other(absl::OkStatus(), -1, with_parameter(21));
  const auto response =
      Publish({with.server.address(), without.server.address(), other.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->bytes(), (2 << 20) + 120);
  EXPECT_EQ(response->results(0).speculator(), v1::SPECULATOR_DELIVERY_SERVED);
  EXPECT_EQ(response->results(1).speculator(), v1::SPECULATOR_DELIVERY_UNUSED);
  for (const int i : {0, 1}) {
    EXPECT_EQ(response->results(i).status().code(), 0) << response->results(i).status().message();
    EXPECT_EQ(response->results(i).digest(), response->weights().digest());
  }
  EXPECT_EQ(with.receiver.ComponentVersion(kSpeculatorComponent)->version, 0);
  EXPECT_EQ(with.told.applied.size(), without.told.applied.size() + 80);
  const absl::Status refused = rpc::FromRpcStatus(response->results(2).status());
  EXPECT_EQ(FieldPath(refused), "manifest.tensors[1].shape");
  EXPECT_EQ(response->results(2).speculator(), v1::SPECULATOR_DELIVERY_UNSPECIFIED);
  EXPECT_EQ(other.receiver.Version().version, -1);
}

TEST_F(PublishTest, AReceiverGoesBackOnlyWhenItIsAskedTo) {
  ReceiverServer newer(absl::OkStatus(), 5);
  const std::string target = newer.server.address();
  auto response = Publish({target});
  ASSERT_TRUE(response.ok());
  EXPECT_EQ(Reason(rpc::FromRpcStatus(response->results(0).status())), "STALE_WEIGHT_VERSION");
  EXPECT_EQ(newer.receiver.Version().version, 5);
  response = Publish({target}, true);
  ASSERT_TRUE(response.ok());
  EXPECT_EQ(response->results(0).status().code(), 0) << response->results(0).status().message();
  EXPECT_EQ(newer.receiver.Version().version, 0);
}

// A target that accepts the connection and never answers.
TEST_F(PublishTest, CancelledPublicationsHoldNoWorker) {
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(silent, 64), 0);
  ASSERT_EQ(getsockname(silent, reinterpret_cast<sockaddr*>(&address), &size), 0);
  v1::PublishWeightsRequest request;
  request.add_targets(absl::StrCat("127.0.0.1:", ntohs(address.sin_port)));

  constexpr int kCalls = 12;  // with a timeout of 10 s each they would occupy the workers for 30 s
  std::vector<grpc::ClientContext> contexts(kCalls);
  std::vector<v1::PublishWeightsResponse> responses(kCalls);
  std::atomic<int> ended = 0;
  for (int i = 0; i < kCalls; ++i) {
    stub_->async()->PublishWeights(&contexts[i], &request, &responses[i],
                                   [&](const grpc::Status&) { ++ended; });
  }
  ASSERT_TRUE(rpc::Eventually([&] { return server_.server().live_calls() == kCalls; }));
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  ASSERT_TRUE(rpc::Eventually([&] { return ended == kCalls; }));
  std::atomic<bool> worked = false;
  ASSERT_TRUE(server_.executor().Run([&] { worked = true; }).ok());
  EXPECT_TRUE(rpc::Eventually([&] { return worked.load(); }));
  close(silent);
}

TEST_F(PublishTest, AFailedSnapshotFailsTheCall) {
  engine_->FailNext(absl::InternalError("no memory"));
  EXPECT_EQ(Publish({"127.0.0.1:1"}).status().code(), absl::StatusCode::kInternal);
}

TEST_F(PublishTest, BadTargetsAreRefusedByName) {
  EXPECT_EQ(FieldPath(Publish({}).status()), "targets");
  for (const char* bad : {"", "localhost", ":7701", "host:", "host:x", "host:0", "host:70000"}) {
    EXPECT_EQ(FieldPath(Publish({"a:1", bad}).status()), "targets[1]") << bad;
  }
  EXPECT_EQ(FieldPath(Publish({"a:1", "b:1", "a:1"}).status()), "targets[2]");
}

}  // namespace
}  // namespace tandem::trainer
