// Sender and receiver over a real connection.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/rpc/error_table.h"
#include "common/rpc/proto_convert.h"
#include "common/rpc/test_server.h"
#include "common/rpc/weight_receiver_service.h"
#include "common/rpc/weight_sender.h"
#include "common/tensor/checksum.h"

namespace tandem::rpc {
namespace {

// Keeps the bytes of one update.
class FakeReceiver final : public WeightReceiver {
 public:
  absl::StatusOr<int64_t> Begin(const std::string& id, const WeightManifest& manifest) override {
    std::lock_guard lock(mutex_);
    if (manifest.version <= version_.version) {
      return WithReason(absl::FailedPreconditionError("stale"), reason::kStaleWeightVersion);
    }
    if (id != id_) bytes_.clear();
    id_ = id;
    manifest_ = manifest;
    return static_cast<int64_t>(bytes_.size());
  }
  absl::Status Append(const std::string& id, int64_t offset,
                      absl::Span<const std::byte> data) override {
    std::lock_guard lock(mutex_);
    if (id != id_) return absl::NotFoundError("not open");
    if (fail_after_chunks_ == 0) {
      fail_after_chunks_ = -1;
      return absl::UnavailableError("the connection broke");
    }
    if (fail_after_chunks_ > 0) --fail_after_chunks_;
    EXPECT_EQ(offset, static_cast<int64_t>(bytes_.size()));
    bytes_.append(reinterpret_cast<const char*>(data.data()), data.size());
    appended_bytes_ += static_cast<int64_t>(data.size());
    return absl::OkStatus();
  }
  absl::StatusOr<WeightsVersion> Commit(const std::string& id) override {
    std::lock_guard lock(mutex_);
    if (id == committed_id_) return version_;
    if (id != id_) return absl::NotFoundError("not open");
    const std::string digest = lie_ ? std::string(32, '0') : Xxh3Hex(bytes_.data(), bytes_.size());
    if (!lie_ && digest != manifest_.digest) return absl::DataLossError("digest");
    version_ = {manifest_.version, digest};
    committed_id_ = id;
    id_.clear();
    return version_;
  }
  absl::Status Abort(const std::string& id) override {
    std::lock_guard lock(mutex_);
    if (id != id_) return absl::NotFoundError("not open");
    id_.clear();
    bytes_.clear();
    return absl::OkStatus();
  }
  WeightsVersion Version() const override {
    std::lock_guard lock(mutex_);
    return version_;
  }
  std::string OpenUpdateId() const override {
    std::lock_guard lock(mutex_);
    return id_;
  }

  mutable std::mutex mutex_;
  std::string id_, committed_id_, bytes_;
  WeightManifest manifest_;
  WeightsVersion version_;
  int64_t appended_bytes_ = 0;
  int fail_after_chunks_ = -1;
  bool lie_ = false;
};

class BytesSource final : public WeightSource {
 public:
  explicit BytesSource(int64_t elements, int64_t version = 1) {
    for (int64_t i = 0; i < elements * 4; ++i)
      bytes_.push_back(static_cast<char>(i * 31 + version));
    manifest_.version = version;
    manifest_.tensors = {{"w", DType::kFloat32, {elements}}};
    manifest_.total_bytes = elements * 4;
    manifest_.digest = Xxh3Hex(bytes_.data(), bytes_.size());
  }
  const WeightManifest& manifest() const override { return manifest_; }
  void Read(int64_t offset, absl::Span<std::byte> out) const override {
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  std::string bytes_;
  WeightManifest manifest_;
};

class ReceiverApp final : public ServerApp {
 public:
  ReceiverApp(ServerRuntime& runtime, FakeReceiver* receiver)
      : service_(runtime.executor, runtime.metrics) {
    service_.SetReceiver(receiver);
  }
  std::vector<NamedService> services() override {
    return {{weights::v1::WeightService::service_full_name(), &service_}};
  }
  absl::Status Load() override { return absl::OkStatus(); }

 private:
  WeightReceiverService service_;
};

class WeightTransferTest : public testing::Test {
 protected:
  static constexpr int64_t kChunk = 1000;
  WeightSenderOptions Options() {
    WeightSenderOptions options;
    options.chunk_bytes = kChunk;
    options.backoff = absl::Milliseconds(1);
    return options;
  }
  absl::Status Begin(const std::string& id, const BytesSource& source) {
    grpc::ClientContext context;
    weights::v1::BeginUpdateRequest request;
    request.set_update_id(id);
    WeightManifestToProto(source.manifest(), kChunk, request.mutable_manifest());
    weights::v1::BeginUpdateResponse response;
    return FromGrpcStatus(stub_->BeginUpdate(&context, request, &response));
  }
  absl::Status UploadChunk(const std::string& id, int64_t index, const std::string& data,
                           uint64_t checksum) {
    grpc::ClientContext context;
    weights::v1::UploadWeightsResponse response;
    auto stream = stub_->UploadWeights(&context, &response);
    weights::v1::UploadWeightsRequest chunk;
    chunk.set_update_id(id);
    chunk.set_chunk_index(index);
    chunk.set_data(data);
    chunk.set_checksum(checksum);
    stream->Write(chunk);
    stream->WritesDone();
    return FromGrpcStatus(stream->Finish());
  }

  FakeReceiver receiver_;
  TestServer server_{[this](ServerRuntime& runtime) {
    return std::make_unique<ReceiverApp>(runtime, &receiver_);
  }};
  std::unique_ptr<weights::v1::WeightService::Stub> stub_ =
      weights::v1::WeightService::NewStub(server_.channel());
};

TEST_F(WeightTransferTest, EveryByteArrivesAndIsCommitted) {
  const BytesSource source(2620);  // not a multiple of the chunk
  const auto version = SendWeights(*stub_, "u1", source, Options());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->version, 1);
  EXPECT_EQ(version->digest, source.manifest().digest);
  EXPECT_EQ(receiver_.bytes_, source.bytes_);
  EXPECT_NE(server_.metrics().Text().find("tandem_weight_bytes_received_total 10480"),
            std::string::npos);
}

TEST_F(WeightTransferTest, OneMiBChunksPassTheMessageLimit) {
  const BytesSource source(1 << 20);
  WeightSenderOptions options;
  EXPECT_TRUE(SendWeights(*stub_, "u1", source, options).ok());
  options.chunk_bytes = kMaxChunkBytes;
  EXPECT_TRUE(SendWeights(*stub_, "u2", BytesSource(1 << 20, 2), options).ok());
}

TEST_F(WeightTransferTest, ARepeatOfACommittedUpdateIsTheSameAnswer) {
  const BytesSource source(100);
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
  grpc::ClientContext context;
  weights::v1::CommitUpdateRequest request;
  request.set_update_id("u1");
  weights::v1::CommitUpdateResponse response;
  ASSERT_TRUE(stub_->CommitUpdate(&context, request, &response).ok());
  EXPECT_EQ(response.weights().digest(), source.manifest().digest);
}

TEST_F(WeightTransferTest, AnInterruptedUploadGoesOnWhereItStopped) {
  receiver_.fail_after_chunks_ = 3;
  const BytesSource source(2500);
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
  EXPECT_EQ(receiver_.bytes_, source.bytes_);
  EXPECT_EQ(receiver_.appended_bytes_, 10000) << "nothing was sent twice";
}

TEST_F(WeightTransferTest, ADamagedChunkIsDataLossAndLeavesTheUpdateOpen) {
  const BytesSource source(500);
  ASSERT_TRUE(Begin("u1", source).ok());
  const std::string good = source.bytes_.substr(0, kChunk);
  std::string bad = good;
  bad[17] ^= 1;
  const absl::Status status = UploadChunk("u1", 0, bad, Xxh3_64(good.data(), good.size()));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Reason(status), "CHUNK_DAMAGED");
  EXPECT_EQ(receiver_.appended_bytes_, 0);
  EXPECT_EQ(receiver_.OpenUpdateId(), "u1");
  EXPECT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
}

TEST_F(WeightTransferTest, ChunksOutOfOrderOrOfTheWrongSizeAreRefused) {
  const BytesSource source(500);
  ASSERT_TRUE(Begin("u1", source).ok());
  const std::string chunk = source.bytes_.substr(0, kChunk);
  const uint64_t checksum = Xxh3_64(chunk.data(), chunk.size());
  EXPECT_EQ(FieldPath(UploadChunk("u1", 1, chunk, checksum)), "chunk_index");
  EXPECT_EQ(FieldPath(UploadChunk("u1", 0, chunk.substr(1), checksum)), "data");
  EXPECT_EQ(UploadChunk("u9", 0, chunk, checksum).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(UploadChunk("u1", 0, chunk, checksum).ok());
  EXPECT_EQ(FieldPath(UploadChunk("u1", 0, chunk, checksum)), "chunk_index") << "a repeat";
}

TEST_F(WeightTransferTest, AStaleVersionIsNotRetried) {
  ASSERT_TRUE(SendWeights(*stub_, "u1", BytesSource(10, 5), Options()).ok());
  const auto result = SendWeights(*stub_, "u2", BytesSource(10, 4), Options());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(result.status()), "STALE_WEIGHT_VERSION");
}

TEST_F(WeightTransferTest, AWrongDigestInTheAnswerIsDataLoss) {
  receiver_.lie_ = true;
  const auto result = SendWeights(*stub_, "u1", BytesSource(10), Options());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Reason(result.status()), "DIGEST_MISMATCH");
}

TEST_F(WeightTransferTest, AReceiverThatIsAwayBoundsTheWait) {
  server_.Stop();
  WeightSenderOptions options = Options();
  options.max_attempts = 3;
  options.rpc_timeout = absl::Seconds(5);
  EXPECT_EQ(SendWeights(*stub_, "u1", BytesSource(10), options).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(WeightTransferTest, BadManifestsNameTheField) {
  grpc::ClientContext context;
  weights::v1::BeginUpdateRequest request;
  request.set_update_id("u1");
  WeightManifestToProto(BytesSource(10).manifest(), (3 << 20) + 1, request.mutable_manifest());
  weights::v1::BeginUpdateResponse response;
  EXPECT_EQ(FieldPath(FromGrpcStatus(stub_->BeginUpdate(&context, request, &response))),
            "manifest.chunk_bytes");
  request.mutable_manifest()->set_chunk_bytes(10);
  request.mutable_manifest()->set_total_bytes(7);
  grpc::ClientContext second;
  EXPECT_EQ(FieldPath(FromGrpcStatus(stub_->BeginUpdate(&second, request, &response))),
            "manifest.total_bytes");
}

TEST_F(WeightTransferTest, AbortDropsTheUpdate) {
  ASSERT_TRUE(Begin("u1", BytesSource(500)).ok());
  weights::v1::AbortUpdateRequest request;
  request.set_update_id("u1");
  weights::v1::AbortUpdateResponse response;
  grpc::ClientContext first, second;
  EXPECT_TRUE(stub_->AbortUpdate(&first, request, &response).ok());
  EXPECT_EQ(stub_->AbortUpdate(&second, request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace tandem::rpc
