// Sender and receiver over a real connection.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/shared_file.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/testing/server.h"
#include "common/rpc/transfer/weight_receiver_service.h"
#include "common/rpc/transfer/weight_sender.h"
#include "common/weights/staged_weight_receiver.h"
#include "common/weights/testing/stream_digest.h"
#include "common/weights/testing/told_weights.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;

// The receiver of the engines, behind a connection that breaks.
class FlakyReceiver final : public WeightReceiver {
 public:
  explicit FlakyReceiver(int64_t elements, std::vector<ReceivedComponent> components = {},
                         DType type = DType::kFloat32)
      : elements_(elements), components_(std::move(components)) {
    Restart(type);
  }
  // Forgets all updates, and wants tensors in `type`.
  void Restart(DType type) {
    receiver_.emplace(
        std::vector<WeightSpec>{{.name = "w", .dtype = type, .shape = {elements_}}}, std::nullopt,
        /*num_token_ids=*/7, WeightsVersion(), Tell(told_), components_, /*allow_not_finite=*/true);
  }

  absl::StatusOr<int64_t> Begin(const std::string& id, const WeightManifest& manifest,
                                bool allow_rollback) override {
    ++begun_;
    return receiver_->Begin(id, manifest, allow_rollback);
  }
  absl::StatusOr<int64_t> Append(const std::string& id, int64_t chunk_index,
                                 absl::Span<const std::byte> data) override {
    return AppendUnlessBroken([&] { return receiver_->Append(id, chunk_index, data); });
  }
  absl::StatusOr<int64_t> AppendShared(const std::string& id, int64_t chunk_index,
                                       const std::shared_ptr<const SharedBytes>& bytes,
                                       absl::Span<const FileRange> ranges) override {
    return AppendUnlessBroken(
        [&] { return receiver_->AppendShared(id, chunk_index, bytes, ranges); });
  }
  absl::StatusOr<int64_t> AppendUnlessBroken(absl::FunctionRef<absl::StatusOr<int64_t>()> append) {
    if (chunks_until_break_ == 0) {
      chunks_until_break_ = chunks_between_breaks_.load();
      if (restarts_as_.has_value()) Restart(*restarts_as_);
      return absl::UnavailableError("the connection broke");
    }
    if (chunks_until_break_ > 0) --chunks_until_break_;
    absl::StatusOr<int64_t> next = append();
    chunks_appended_ += next.ok();
    return next;
  }
  absl::StatusOr<WeightsVersion> Commit(const std::string& id, const CallScope& call) override {
    absl::StatusOr<WeightsVersion> version = receiver_->Commit(id, call);
    if (version.ok() && lie_) version->digest = std::string(32, '0');
    return version;
  }
  absl::Status Abort(const std::string& id) override { return receiver_->Abort(id); }
  WeightsVersion Version() const override { return receiver_->Version(); }
  TensorTypes WantedTypes() const override {
    const TensorTypes types = receiver_->WantedTypes();
    return std::exchange(told_types_, std::nullopt).value_or(types);
  }
  std::optional<WeightsVersion> ComponentVersion(absl::string_view name) const override {
    return receiver_->ComponentVersion(name);
  }
  bool ReadsGpuMemory() const override { return gpu_ != nullptr; }
  absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenGpuMemory(
      absl::Span<const GpuMemory> memories) override {
    if (gpu_ == nullptr) return WeightReceiver::OpenGpuMemory(memories);
    opened_gpu_.assign(memories.begin(), memories.end());
    for (const GpuMemory& memory : memories) {
      if (memory.handle != "handle") return absl::FailedPreconditionError("another handle");
    }
    return std::make_shared<const FakeGpuMemory>(*gpu_);
  }
  std::string OpenUpdateId() const override { return receiver_->OpenUpdateId(); }
  void DropAbandoned(SteadyTime now) override { receiver_->DropAbandoned(now); }

  // The bytes of the update in force.
  std::string applied() const {
    return {reinterpret_cast<const char*>(told_.applied.data()), told_.applied.size()};
  }

  const int64_t elements_;
  const std::vector<ReceivedComponent> components_;
  Told told_;
  std::optional<StagedWeightReceiver> receiver_;
  std::atomic<int> chunks_appended_ = 0;
  std::atomic<int> begun_ = 0;
  // The type that the receiver restarts with when the connection breaks.
  std::optional<DType> restarts_as_;
  // The answer to the next question for types, as of a receiver that restarts behind it.
  mutable std::optional<TensorTypes> told_types_;
  // The connection breaks after this many chunks, and then again and again; negative: never.
  std::atomic<int> chunks_until_break_ = -1;
  std::atomic<int> chunks_between_breaks_ = -1;
  bool lie_ = false;
  const std::string* gpu_ =
      nullptr;  // the bytes of the sender's GPU, if the receiver can read them
  std::vector<GpuMemory> opened_gpu_;  // that it was asked for
};

class BytesSource final : public WeightSource {
 public:
  static constexpr int64_t kElements = 2620;  // 10,480 bytes: the last of 11 chunks is shorter
  static constexpr int64_t kChunk = 1000;
  explicit BytesSource(int64_t version = 1, int64_t elements = kElements,
                       int64_t chunk_bytes = kChunk) {
    for (int64_t i = 0; i < elements * 4; ++i) {
      bytes_.push_back(static_cast<char>(i * 31 + version));
    }
    manifest_.version = version;
    manifest_.tensors = {{"w", DType::kFloat32, {elements}}};
    manifest_.total_bytes = elements * 4;
    manifest_.chunk_bytes = chunk_bytes;
    SetDigests();
    manifest_.num_token_ids = 7;
  }
  // The last of the elements become a speculator's.
  void CutSpeculator(int64_t elements) {
    const int64_t rest = manifest_.tensors[0].shape[0] - elements;
    manifest_.tensors = {{"w", DType::kFloat32, {rest}},
                         {"speculator.h", DType::kFloat32, {elements}}};
    manifest_.components = {{.name = kSpeculatorComponent, .config = "{}", .digest = {}}};
    SetDigests();
  }
  // Adds a second form of the tensor behind the first. Nothing here knows that it is the first one
  // rounded.
  void AddBfloat16() {
    WeightSpec rounded = manifest_.tensors[0];
    rounded.dtype = DType::kBFloat16;
    for (int64_t i = 0; i < rounded.bytes(); ++i) bytes_.push_back(static_cast<char>(i * 7 + 3));
    sums_ = {SumBytes(0, bytes_.data(), manifest_.total_bytes),
             SumBytes(0, bytes_.data() + manifest_.total_bytes, rounded.bytes())};
    manifest_.tensors.push_back(rounded);
    manifest_.total_bytes += rounded.bytes();
  }
  // Keeps the second form alone.
  void DropFloat32() {
    bytes_ = bfloat16_bytes();
    sums_ = {sums_[1]};
    manifest_.tensors = {manifest_.tensors[1]};
    manifest_.total_bytes = manifest_.tensors[0].bytes();
  }
  std::string float32_bytes() const { return bytes_.substr(0, kElements * 4); }
  std::string bfloat16_bytes() const { return bytes_.substr(kElements * 4); }

  const WeightManifest& manifest() const override { return manifest_; }
  absl::Span<const WordSums> sums() const override { return sums_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    ++reads_;
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return absl::OkStatus();
  }
  const FileDescriptor* file() const override { return file_.get(); }
  absl::Span<const GpuMemory> gpu_memories() const override { return gpu_; }
  // Offers the bytes as memory of a GPU, or of several.
  void OfferGpu(const std::vector<std::string>& handles) {
    const int64_t all = std::ssize(bytes_), parts = std::ssize(handles);
    for (int64_t i = 0; i < parts; ++i) {
      gpu_.push_back({.machine = MachineId(),
                      .handle = handles[static_cast<size_t>(i)],
                      .size = all * (i + 1) / parts - all * i / parts});
    }
  }
  // Writes the bytes to a file, too.
  void MakeFile() { UseFile(FileDescriptor::CreateUnnamed(testing::TempDir()).value()); }
  void UseFile(FileDescriptor file) {
    file_ = std::make_unique<FileDescriptor>(std::move(file));
    ASSERT_TRUE(file_->WriteAll(bytes_).ok());
  }
  // Makes the digests those of the bytes.
  void SetDigests() {
    const auto* const data = reinterpret_cast<const std::byte*>(bytes_.data());
    const absl::Span<const std::byte> stream(data, bytes_.size());
    manifest_.digest = StreamDigest({manifest_.tensors[0]}, stream);
    if (manifest_.components.empty()) return;
    manifest_.components[0].digest = StreamDigest(
        {manifest_.tensors[1]}, stream.subspan(static_cast<size_t>(manifest_.tensors[0].bytes())));
  }
  std::string bytes_;
  WeightManifest manifest_;
  std::vector<WordSums> sums_;
  std::unique_ptr<FileDescriptor> file_;
  std::vector<GpuMemory> gpu_;
  mutable int reads_ = 0;
};

class ReceiverApp final : public ServerApp {
 public:
  ReceiverApp(ServerRuntime& runtime, WeightReceiver* receiver)
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
  WeightSenderOptions Options() {
    WeightSenderOptions options;
    options.backoff = absl::Milliseconds(1);
    return options;
  }
  absl::Status Begin(const std::string& id, const BytesSource& source) {
    grpc::ClientContext context;
    weights::v1::BeginUpdateRequest request;
    request.set_update_id(id);
    WeightManifestToProto(source.manifest(), request.mutable_manifest());
    weights::v1::BeginUpdateResponse response;
    return FromGrpcStatus(stub_->BeginUpdate(&context, request, &response));
  }
  absl::Status UploadChunk(const std::string& id, int64_t index, const std::string& data,
                           uint64_t checksum) {
    weights::v1::UploadWeightsRequest chunk;
    chunk.set_update_id(id);
    chunk.set_chunk_index(index);
    chunk.set_data(data);
    chunk.set_checksum(checksum);
    return Upload(chunk);
  }
  absl::Status Upload(const weights::v1::UploadWeightsRequest& chunk) {
    grpc::ClientContext context;
    weights::v1::UploadWeightsResponse response;
    auto stream = stub_->UploadWeights(&context, &response);
    stream->Write(chunk);
    stream->WritesDone();
    return FromGrpcStatus(stream->Finish());
  }

  FlakyReceiver receiver_{BytesSource::kElements};
  TestServer server_{[this](ServerRuntime& runtime) {
    return std::make_unique<ReceiverApp>(runtime, &receiver_);
  }};
  std::unique_ptr<weights::v1::WeightService::Stub> stub_ =
      weights::v1::WeightService::NewStub(server_.channel());
};

TEST_F(WeightTransferTest, EveryByteArrivesAndIsCommitted) {
  const BytesSource source;
  const auto version = SendWeights(*stub_, "u1", source, Options());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->weights.version, 1);
  EXPECT_EQ(version->weights.digest, source.manifest().digest);
  EXPECT_EQ(version->bytes, 10480);
  EXPECT_TRUE(version->components.empty());
  EXPECT_EQ(receiver_.applied(), source.bytes_);
  EXPECT_NE(server_.metrics().Text().find(
                "tandem_weight_bytes_received_total{transport=\"stream\"} 10480"),
            std::string::npos);
}

TEST_F(WeightTransferTest, AReceiverOnTheSendersMachineReadsItsFile) {
  BytesSource source;
  source.MakeFile();
  receiver_.chunks_until_break_ = 3;
  const auto sent = SendWeights(*stub_, "u1", source, Options());
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->transport, SentWeights::Transport::kFile);
  EXPECT_EQ(sent->bytes, 10480);
  EXPECT_EQ(receiver_.applied(), source.bytes_);
  EXPECT_EQ(receiver_.chunks_appended_, 11) << "nothing was read twice";
  EXPECT_EQ(source.reads_, 0) << "no bytes travelled";
  EXPECT_NE(
      server_.metrics().Text().find("tandem_weight_bytes_received_total{transport=\"file\"} 10480"),
      std::string::npos);
}

TEST_F(WeightTransferTest, AReceiverOnTheSendersMachineReadsTheMemoryOfItsGpu) {
  BytesSource source;
  source.OfferGpu({"handle"});
  receiver_.gpu_ = &source.bytes_;
  receiver_.chunks_until_break_ = 3;
  const auto sent = SendWeights(*stub_, "u1", source, Options());
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->transport, SentWeights::Transport::kGpu);
  EXPECT_EQ(receiver_.applied(), source.bytes_);
  EXPECT_EQ(receiver_.chunks_appended_, 11) << "nothing was read twice";
  EXPECT_EQ(receiver_.told_.shared, 1) << "nothing came over the host";
  EXPECT_EQ(source.reads_, 0) << "no bytes travelled";
  EXPECT_NE(
      server_.metrics().Text().find("tandem_weight_bytes_received_total{transport=\"gpu\"} 10480"),
      std::string::npos);
}

// As of a sender of several ranks. A receiver that can open only some of them gets the bytes.
TEST_F(WeightTransferTest, AReceiverReadsAllMemoriesOrNone) {
  const std::vector<std::pair<std::vector<std::string>, SentWeights::Transport>> cases = {
      {{"handle", "handle"}, SentWeights::Transport::kGpu},
      {{"handle", "of another machine"}, SentWeights::Transport::kStream}};
  for (const auto& [handles, transport] : cases) {
    BytesSource source;
    source.OfferGpu(handles);
    receiver_.gpu_ = &source.bytes_;
    receiver_.Restart(DType::kFloat32);
    const auto sent = SendWeights(*stub_, handles[1], source, Options());
    ASSERT_TRUE(sent.ok()) << sent.status();
    EXPECT_EQ(sent->transport, transport);
    EXPECT_EQ(receiver_.applied(), source.bytes_);
    ASSERT_EQ(receiver_.opened_gpu_.size(), 2U);
    EXPECT_EQ(receiver_.opened_gpu_[1].handle, handles[1]);
    EXPECT_EQ(receiver_.opened_gpu_[0].size + receiver_.opened_gpu_[1].size,
              std::ssize(source.bytes_));
  }
}

// The digest is made of what the engine has read.
TEST_F(WeightTransferTest, MemoryOfAGpuThatChangedIsDataLoss) {
  BytesSource source;
  source.OfferGpu({"handle"});
  std::string changed = source.bytes_;
  changed[17] ^= 1;
  receiver_.gpu_ = &changed;
  const absl::Status status = SendWeights(*stub_, "u1", source, Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  EXPECT_EQ(receiver_.Version().version, 0) << "the old weights serve";
}

TEST_F(WeightTransferTest, AReceiverThatCannotOpenTheMemoryGetsTheBytes) {
  BytesSource source;
  source.OfferGpu({"of another machine"});
  for (const auto& [update, opens] : {std::pair{"u1", false}, {"u2", true}}) {
    receiver_.gpu_ = opens ? &source.bytes_ : nullptr;
    receiver_.Restart(DType::kFloat32);
    const auto sent = SendWeights(*stub_, update, source, Options());
    ASSERT_TRUE(sent.ok()) << sent.status();
    EXPECT_EQ(sent->transport, SentWeights::Transport::kStream);
    EXPECT_EQ(receiver_.applied(), source.bytes_);
  }
  weights::v1::UploadWeightsRequest chunk;
  chunk.set_update_id("u3");
  chunk.mutable_gpu_memory()->set_handle("x");
  const absl::Status other = Upload(chunk);
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(other), "gpu_memory");
}

TEST_F(WeightTransferTest, AReceiverSaysWhereItReadsMemoryOfGpus) {
  EXPECT_FALSE(AskWanted(*stub_)->reads_gpu_memory);
  const std::string bytes;
  receiver_.gpu_ = &bytes;
  EXPECT_TRUE(AskWanted(*stub_)->reads_gpu_memory);
}

TEST_F(WeightTransferTest, AFileWithANameIsNotRead) {
  BytesSource source;
  const std::string path = testing::TempDir() + "weights_" + std::to_string(::getpid());
  source.UseFile(FileDescriptor::Open(path, O_CREAT | O_RDWR).value());
  const auto sent = SendWeights(*stub_, "u1", source, Options());
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->transport, SentWeights::Transport::kStream);
  EXPECT_EQ(receiver_.applied(), source.bytes_);
  std::filesystem::remove(path);
}

// The digest covers bytes that no checksum does.
TEST_F(WeightTransferTest, AFileThatChangedIsDataLoss) {
  BytesSource source;
  source.MakeFile();
  const std::byte other{0x7f};
  ASSERT_TRUE(source.file_->WriteAllAt(17, {&other, 1}).ok());
  const absl::Status status = SendWeights(*stub_, "u1", source, Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  EXPECT_EQ(receiver_.Version().version, 0) << "the old weights serve";
}

TEST_F(WeightTransferTest, AFileThatEndsTooEarlyIsDataLoss) {
  BytesSource source;
  source.MakeFile();
  ASSERT_EQ(::ftruncate(source.file_->get(), 5000), 0);
  const absl::Status status = SendWeights(*stub_, "u1", source, Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ends at byte 5000"));
  EXPECT_EQ(receiver_.Version().version, 0) << "the old weights serve";
}

TEST_F(WeightTransferTest, BadRangesNameTheField) {
  BytesSource source;
  source.MakeFile();
  ASSERT_TRUE(Begin("u1", source).ok());
  weights::v1::UploadWeightsRequest chunk;
  chunk.set_update_id("u1");
  auto* const range = chunk.add_ranges();
  range->set_size(BytesSource::kChunk);
  EXPECT_EQ(FieldPath(Upload(chunk)), "ranges") << "of which file";
  SharedFileToProto(Share(*source.file_).value(), chunk.mutable_shared_file());
  chunk.set_data("x");
  EXPECT_EQ(FieldPath(Upload(chunk)), "ranges");
  chunk.clear_data();
  range->set_offset(-1);
  EXPECT_EQ(FieldPath(Upload(chunk)), "ranges[0].offset");
  range->set_offset(0);
  for (const int64_t size : {int64_t{-1}, int64_t{0}, kMaxChunkBytes + 1}) {
    range->set_size(size);
    EXPECT_EQ(FieldPath(Upload(chunk)), "ranges[0].size");
  }
  range->set_size(1);
  EXPECT_EQ(FieldPath(Upload(chunk)), "data") << "the chunk is too short";
  range->set_size(BytesSource::kChunk);
  chunk.mutable_shared_file()->set_inode(1);
  const absl::Status other = Upload(chunk);
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(other), "shared_file");
  EXPECT_EQ(receiver_.chunks_appended_, 0);
}

TEST(WeightTransferSpeculatorTest, AReceiverIsSentTheSpeculatorThatItHasAUseFor) {
  BytesSource source;
  source.CutSpeculator(20);
  const int64_t elements = BytesSource::kElements - 20;
  const ReceivedComponent speculator = {.name = kSpeculatorComponent,
                                        .config = "{}",
                                        .parameters = {{.name = "speculator.h", .shape = {20}}},
                                        .initial = {.version = 0, .digest = std::string(32, '0')}};
  FlakyReceiver with(elements, {speculator}), without(elements);
  for (FlakyReceiver* receiver : {&with, &without}) {
    receiver->chunks_until_break_ = 4;
    TestServer server(
        [&](ServerRuntime& runtime) { return std::make_unique<ReceiverApp>(runtime, receiver); });
    const auto stub = weights::v1::WeightService::NewStub(server.channel());
    WeightSenderOptions options;
    options.backoff = absl::Milliseconds(1);
    const auto sent = SendWeights(*stub, "u1", source, options);
    ASSERT_TRUE(sent.ok()) << sent.status();
    EXPECT_EQ(sent->weights.digest, source.manifest().digest);
    EXPECT_EQ(sent->components.contains(kSpeculatorComponent), receiver == &with);
    EXPECT_EQ(sent->bytes, receiver == &with ? 10480 : 10400);
    EXPECT_EQ(receiver->applied(), source.bytes_.substr(0, sent->bytes));
    const auto repeat = SendWeights(*stub, "u2", source, options);
    ASSERT_TRUE(repeat.ok()) << repeat.status();
    EXPECT_EQ(repeat->bytes, 0) << "it is served already";
    EXPECT_EQ(repeat->components.contains(kSpeculatorComponent), receiver == &with);
  }
  EXPECT_EQ(*with.ComponentVersion(kSpeculatorComponent),
            (WeightsVersion{1, source.manifest().components[0].digest}));
  // The same model with another speculator is another update.
  BytesSource other;
  other.bytes_.back() ^= 1;
  other.CutSpeculator(20);
  EXPECT_EQ(other.manifest().digest, source.manifest().digest);
  TestServer server(
      [&](ServerRuntime& runtime) { return std::make_unique<ReceiverApp>(runtime, &with); });
  const auto stub = weights::v1::WeightService::NewStub(server.channel());
  with.chunks_until_break_ = -1;
  const auto heads_alone = SendWeights(*stub, "u3", other);
  ASSERT_TRUE(heads_alone.ok()) << heads_alone.status();
  EXPECT_EQ(heads_alone->bytes, 80) << "the model is served already";
  EXPECT_EQ(with.applied(), other.bytes_.substr(10400));
  EXPECT_EQ(with.ComponentVersion(kSpeculatorComponent)->digest,
            other.manifest().components[0].digest);
}

TEST(WeightTransferComponentsTest, WhatAReceiverDoesNotTakeIsCutOutOfTheStream) {
  BytesSource source;
  source.manifest_.tensors = {{"a", DType::kFloat32, {1010}},
                              {"speculator.h", DType::kFloat32, {20}},
                              {"b", DType::kFloat32, {1590}}};
  source.manifest_.components = {
      {.name = kSpeculatorComponent, .config = "{}", .digest = std::string(32, '0')}};
  std::string model;
  const auto renew = [&](int64_t version) {
    source.manifest_.version = version;
    source.bytes_[0] = static_cast<char>(version);
    model = source.bytes_.substr(0, 4040) + source.bytes_.substr(4120);
    source.manifest_.digest =
        StreamDigest({source.manifest_.tensors[0], source.manifest_.tensors[2]},
                     {reinterpret_cast<const std::byte*>(model.data()), model.size()});
  };
  renew(1);
  Told told;
  StagedWeightReceiver receiver({{.name = "a", .shape = {1010}}, {.name = "b", .shape = {1590}}},
                                std::nullopt, /*num_token_ids=*/7, {}, Tell(told), {},
                                /*allow_not_finite=*/true);
  TestServer server(
      [&](ServerRuntime& runtime) { return std::make_unique<ReceiverApp>(runtime, &receiver); });
  const auto stub = weights::v1::WeightService::NewStub(server.channel());
  const auto sent = SendWeights(*stub, "u1", source);
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->bytes, 10400);
  const auto applied = [&] {
    return std::string(reinterpret_cast<const char*>(told.applied.data()), told.applied.size());
  };
  EXPECT_TRUE(applied() == model);

  renew(2);
  source.MakeFile();
  ASSERT_EQ(SendWeights(*stub, "u2", source)->transport, SentWeights::Transport::kFile);
  EXPECT_TRUE(applied() == model) << "a chunk has two places in the file";
}

// A source with both forms of its tensor, and a receiver that wants the second one.
class WeightTransferTypesTest : public testing::Test {
 protected:
  WeightTransferTypesTest() {
    source_.AddBfloat16();
    options_.backoff = absl::Milliseconds(1);
  }
  absl::StatusOr<SentWeights> Send() { return SendWeights(*stub_, "u1", source_, options_); }

  BytesSource source_;
  FlakyReceiver receiver_{BytesSource::kElements, {}, DType::kBFloat16};
  WeightSenderOptions options_;
  TestServer server_{[this](ServerRuntime& runtime) {
    return std::make_unique<ReceiverApp>(runtime, &receiver_);
  }};
  std::unique_ptr<weights::v1::WeightService::Stub> stub_ =
      weights::v1::WeightService::NewStub(server_.channel());
};

TEST_F(WeightTransferTypesTest, EveryReceiverGetsTheTypeThatItWants) {
  EXPECT_EQ(AskWanted(*stub_)->types, (TensorTypes{{"w", DType::kBFloat16}}));
  receiver_.chunks_until_break_ = 2;
  const auto sent = Send();
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->bytes, 5240);
  EXPECT_EQ(sent->weights.digest, source_.manifest().digest) << "that of the float32 values";
  EXPECT_EQ(receiver_.Version().digest, source_.manifest().digest);
  EXPECT_EQ(receiver_.applied(), source_.bfloat16_bytes());
  EXPECT_EQ(receiver_.chunks_appended_, 6) << "nothing was sent twice";
  EXPECT_EQ(Send()->bytes, 0) << "it is served already";

  receiver_.Restart(DType::kFloat32);
  EXPECT_TRUE(AskWanted(*stub_)->types.empty());
  const auto wide = Send();
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_EQ(wide->bytes, 10480);
  EXPECT_EQ(receiver_.applied(), source_.float32_bytes());
}

TEST_F(WeightTransferTypesTest, TypesAreToldWhenTheyAreAskedFor) {
  grpc::ClientContext context;
  weights::v1::GetVersionResponse served;
  ASSERT_TRUE(stub_->GetVersion(&context, {}, &served).ok());
  EXPECT_EQ(served.tensor_types_size(), 0);
}

TEST_F(WeightTransferTypesTest, OtherBytesThanWereSummedUpAreDataLoss) {
  source_.bytes_.back() ^= 1;
  options_.max_attempts = 1;
  const absl::Status status = Send().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_TRUE(receiver_.applied().empty());
}

TEST_F(WeightTransferTypesTest, AReceiverMayRestartWithAnotherType) {
  receiver_.chunks_until_break_ = 3;
  receiver_.restarts_as_ = DType::kFloat32;
  const auto sent = Send();
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(receiver_.applied(), source_.float32_bytes());
  EXPECT_EQ(sent->bytes, 10480);
}

TEST_F(WeightTransferTypesTest, ATypeThatWasNotPreparedIsAskedForAgain) {
  source_.DropFloat32();
  receiver_.chunks_until_break_ = 3;
  receiver_.restarts_as_ = DType::kFloat32;
  const absl::Status status = Send().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("wants \"w\" as float32"), std::string::npos) << status;
  EXPECT_EQ(receiver_.Version().version, 0);
}

// Between the question and the beginning of the update.
TEST_F(WeightTransferTypesTest, ARefusedTypeIsAskedForAgain) {
  receiver_.Restart(DType::kFloat32);
  receiver_.told_types_ = TensorTypes{{"w", DType::kBFloat16}};
  const auto sent = Send();
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(receiver_.begun_, 2);
  EXPECT_EQ(receiver_.applied(), source_.float32_bytes());
}

// As one that was prepared before the receiver could be asked.
TEST_F(WeightTransferTypesTest, Float32IsTakenByEveryReceiver) {
  source_ = BytesSource();
  const auto sent = Send();
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(receiver_.applied(), source_.bytes_);
}

TEST(WeightTransferLimitsTest, TheLargestChunksPassTheMessageLimit) {
  FlakyReceiver receiver(1 << 20);
  TestServer server(
      [&](ServerRuntime& runtime) { return std::make_unique<ReceiverApp>(runtime, &receiver); });
  const auto stub = weights::v1::WeightService::NewStub(server.channel());
  EXPECT_TRUE(SendWeights(*stub, "u1", BytesSource(1, 1 << 20, kMaxChunkBytes)).ok());
}

// Once: the receiver can do nothing about it.
TEST_F(WeightTransferTest, WeightsThatCannotBeReadAreAnErrorOfTheSender) {
  class BrokenSource final : public WeightSource {
   public:
    const WeightManifest& manifest() const override { return whole_.manifest(); }
    absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
      if (offset < 3 * BytesSource::kChunk) return whole_.Read(offset, out);
      ++failed_;
      return absl::DataLossError("the disk is broken");
    }
    const BytesSource whole_;
    mutable int failed_ = 0;
  } broken;
  const absl::Status status = SendWeights(*stub_, "u1", broken, Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_EQ(status.message(), "weights to send: the disk is broken");
  EXPECT_EQ(broken.failed_, 1);
  EXPECT_EQ(receiver_.OpenUpdateId(), "") << "the sender aborts what it does not go on with";
  EXPECT_EQ(receiver_.Version().version, 0);
  ASSERT_TRUE(SendWeights(*stub_, "u1", broken.whole_, Options()).ok());
  EXPECT_EQ(receiver_.applied(), broken.whole_.bytes_);
}

TEST_F(WeightTransferTest, ARepeatOfACommittedUpdateIsTheSameAnswer) {
  const BytesSource source;
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
  grpc::ClientContext context;
  weights::v1::CommitUpdateRequest request;
  request.set_update_id("u1");
  weights::v1::CommitUpdateResponse response;
  ASSERT_TRUE(stub_->CommitUpdate(&context, request, &response).ok());
  EXPECT_EQ(response.weights().digest(), source.manifest().digest);
}

TEST_F(WeightTransferTest, AnInterruptedUploadGoesOnWhereItStopped) {
  receiver_.chunks_until_break_ = 3;
  const BytesSource source;
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
  EXPECT_EQ(receiver_.applied(), source.bytes_);
  EXPECT_EQ(receiver_.chunks_appended_, 11) << "nothing was sent twice";
}

TEST_F(WeightTransferTest, AttemptsCountOnlyWithoutProgress) {
  receiver_.chunks_until_break_ = 1;
  receiver_.chunks_between_breaks_ = 1;
  WeightSenderOptions options = Options();
  options.max_attempts = 2;
  const BytesSource source;
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, options).ok());
  EXPECT_EQ(receiver_.applied(), source.bytes_);

  receiver_.chunks_until_break_ = 0;
  receiver_.chunks_between_breaks_ = 0;
  EXPECT_EQ(SendWeights(*stub_, "u2", BytesSource(2), options).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(receiver_.OpenUpdateId(), "") << "a sender that gives up leaves nothing behind";
}

// The caller may repeat its call, and the update then goes on.
TEST_F(WeightTransferTest, AnUpdateWhoseCallerIsGoneStaysOpen) {
  const BytesSource source;
  ASSERT_TRUE(Begin("u1", source).ok());
  std::stop_source gone;
  WeightSenderOptions options = Options();
  options.call.cancellation = gone.get_token();
  options.backoff = absl::InfiniteDuration();
  receiver_.chunks_until_break_ = 3;
  std::thread sender([&] {
    EXPECT_EQ(SendWeights(*stub_, "u1", source, options).status().code(),
              absl::StatusCode::kCancelled);
  });
  while (receiver_.chunks_appended_ < 3) std::this_thread::yield();
  gone.request_stop();
  sender.join();
  EXPECT_EQ(receiver_.OpenUpdateId(), "u1");
  ASSERT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
  EXPECT_EQ(receiver_.applied(), source.bytes_);
}

TEST_F(WeightTransferTest, TwoSendersLearnOfEachOther) {
  const BytesSource ours(1), theirs(2);
  ASSERT_TRUE(Begin("ours", ours).ok());
  ASSERT_TRUE(Begin("theirs", theirs).ok());
  const std::string chunk = ours.bytes_.substr(0, BytesSource::kChunk);
  const absl::Status replaced = UploadChunk("ours", 0, chunk, Xxh3_64(chunk.data(), chunk.size()));
  EXPECT_EQ(replaced.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Reason(replaced), "UPDATE_REPLACED");
  EXPECT_TRUE(SendWeights(*stub_, "theirs", theirs, Options()).ok());
}

TEST_F(WeightTransferTest, ADamagedChunkIsDataLossAndLeavesTheUpdateOpen) {
  const BytesSource source;
  ASSERT_TRUE(Begin("u1", source).ok());
  const std::string good = source.bytes_.substr(0, BytesSource::kChunk);
  std::string bad = good;
  bad[17] ^= 1;
  const absl::Status status = UploadChunk("u1", 0, bad, Xxh3_64(good.data(), good.size()));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Reason(status), "CHUNK_DAMAGED");
  EXPECT_EQ(receiver_.chunks_appended_, 0);
  EXPECT_EQ(receiver_.OpenUpdateId(), "u1");
  EXPECT_TRUE(SendWeights(*stub_, "u1", source, Options()).ok());
}

TEST_F(WeightTransferTest, ChunksOutOfOrderOrOfTheWrongSizeAreRefused) {
  const BytesSource source;
  ASSERT_TRUE(Begin("u1", source).ok());
  const std::string chunk = source.bytes_.substr(0, BytesSource::kChunk);
  const uint64_t checksum = Xxh3_64(chunk.data(), chunk.size());
  const absl::Status early = UploadChunk("u1", 1, chunk, checksum);
  EXPECT_EQ(FieldPath(early), "chunk_index");
  EXPECT_EQ(Reason(early), "CHUNK_OUT_OF_ORDER");
  const std::string shorter = chunk.substr(1);
  EXPECT_EQ(FieldPath(UploadChunk("u1", 0, shorter, Xxh3_64(shorter.data(), shorter.size()))),
            "data");
  EXPECT_EQ(UploadChunk("u9", 0, chunk, checksum).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(UploadChunk("u1", 0, chunk, checksum).ok());
  EXPECT_EQ(FieldPath(UploadChunk("u1", 0, chunk, checksum)), "chunk_index") << "a repeat";
}

TEST_F(WeightTransferTest, AStaleVersionIsNotRetried) {
  ASSERT_TRUE(SendWeights(*stub_, "u1", BytesSource(5), Options()).ok());
  const auto result = SendWeights(*stub_, "u2", BytesSource(4), Options());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(result.status()), "STALE_WEIGHT_VERSION");
}

TEST_F(WeightTransferTest, AWrongDigestInTheAnswerIsDataLoss) {
  receiver_.lie_ = true;
  const auto result = SendWeights(*stub_, "u1", BytesSource(), Options());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Reason(result.status()), "DIGEST_MISMATCH");
}

TEST_F(WeightTransferTest, AReceiverThatIsAwayBoundsTheWait) {
  server_.Stop();
  WeightSenderOptions options = Options();
  options.max_attempts = 3;
  options.rpc_timeout = absl::Seconds(5);
  EXPECT_EQ(SendWeights(*stub_, "u1", BytesSource(), options).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(WeightTransferTest, TheWaitBetweenAttemptsEndsWithTheCall) {
  server_.Stop();
  WeightSenderOptions options = Options();
  options.backoff = absl::Hours(1);
  std::stop_source caller;
  options.call.cancellation = caller.get_token();
  std::thread hangs_up([&] { caller.request_stop(); });
  EXPECT_EQ(SendWeights(*stub_, "u1", BytesSource(), options).status().code(),
            absl::StatusCode::kCancelled);
  hangs_up.join();

  options.call = CallScope();
  options.call.deadline = SteadyTime::Now() + absl::Milliseconds(1);
  EXPECT_EQ(SendWeights(*stub_, "u1", BytesSource(), options).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(WeightTransferTest, BadManifestsNameTheField) {
  grpc::ClientContext context;
  weights::v1::BeginUpdateRequest request;
  request.set_update_id("u1");
  WeightManifestToProto(BytesSource().manifest(), request.mutable_manifest());
  request.mutable_manifest()->set_chunk_bytes(kMaxChunkBytes + 1);
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
  ASSERT_TRUE(Begin("u1", BytesSource()).ok());
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
