#include "services/trainer/service/publish.h"

#include <gmock/gmock.h>

#include "common/rpc/weight_receiver_service.h"
#include "services/trainer/service/test_fixture.h"

namespace tandem::trainer {
namespace {

using testing::HasSubstr;

// Holds weights in memory; `fail_commit` refuses every commit.
class FakeReceiver final : public WeightReceiver {
 public:
  explicit FakeReceiver(WeightsVersion version = {-1, ""}) : version_(std::move(version)) {}

  absl::StatusOr<int64_t> Begin(const std::string& update_id,
                                const WeightManifest& manifest) override {
    std::lock_guard lock(mutex_);
    ++begins_;
    if (manifest.version <= version_.version) {
      return WithReason(absl::FailedPreconditionError("stale"), reason::kStaleWeightVersion);
    }
    if (open_ != update_id) bytes_.clear();
    open_ = update_id;
    manifest_ = manifest;
    return static_cast<int64_t>(bytes_.size());
  }
  absl::Status Append(const std::string&, int64_t offset,
                      absl::Span<const std::byte> data) override {
    std::lock_guard lock(mutex_);
    if (offset != static_cast<int64_t>(bytes_.size())) return absl::InternalError("offset");
    bytes_.insert(bytes_.end(), data.begin(), data.end());
    return absl::OkStatus();
  }
  absl::StatusOr<WeightsVersion> Commit(const std::string&) override {
    std::lock_guard lock(mutex_);
    if (fail_commit) return absl::DataLossError("the digest differs");
    version_ = {manifest_.version, Xxh3Hex(bytes_.data(), bytes_.size())};
    open_.clear();
    return version_;
  }
  absl::Status Abort(const std::string&) override { return absl::OkStatus(); }
  WeightsVersion Version() const override {
    std::lock_guard lock(mutex_);
    return version_;
  }
  std::string OpenUpdateId() const override {
    std::lock_guard lock(mutex_);
    return open_;
  }
  int begins() const {
    std::lock_guard lock(mutex_);
    return begins_;
  }

  bool fail_commit = false;

 private:
  mutable std::mutex mutex_;
  WeightsVersion version_;
  WeightManifest manifest_;
  std::string open_;
  std::vector<std::byte> bytes_;
  int begins_ = 0;
};

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

struct ReceiverServer {
  FakeReceiver receiver;
  rpc::TestServer server{[this](rpc::ServerRuntime& runtime) {
    return std::make_unique<ReceiverApp>(runtime, &receiver);
  }};
};

class PublishTest : public TrainerServerTest {
 protected:
  absl::StatusOr<v1::PublishWeightsResponse> Publish(const std::vector<std::string>& targets) {
    v1::PublishWeightsRequest request;
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

TEST_F(PublishTest, OneDeadReceiverDoesNotConcernTheOthers) {
  ReceiverServer alive, dead, refusing;
  const std::string dead_address = dead.server.address();
  dead.server.Stop();
  refusing.receiver.fail_commit = true;
  const auto response = Publish({dead_address, alive.server.address(), refusing.server.address()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->results(0).status().code(), static_cast<int>(grpc::UNAVAILABLE));
  EXPECT_EQ(response->results(0).digest(), "");
  EXPECT_EQ(response->results(1).status().code(), 0);
  EXPECT_EQ(response->results(2).status().code(), static_cast<int>(grpc::DATA_LOSS));
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
  EXPECT_EQ(a.receiver.begins(), 1);
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
