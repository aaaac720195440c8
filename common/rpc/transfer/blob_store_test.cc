#include "common/rpc/transfer/blob_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/testing/server.h"
#include "common/rpc/transfer/blob_sender.h"
#include "common/rpc/transfer/blob_service.h"

namespace tandem::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kCapacity = 100;

absl::Status Put(BlobStore& store, const std::string& bytes) {
  auto upload = store.Begin(Sha256Hex(bytes), static_cast<int64_t>(bytes.size()));
  if (!upload.ok()) return upload.status();
  absl::Status appended = (*upload)->Append(bytes);
  return appended.ok() ? (*upload)->Finish() : appended;
}

// A reference to these bytes.
VisionReference Named(const std::string& bytes) {
  VisionReference reference;
  reference.digest = Sha256Hex(bytes);
  return reference;
}

bool Has(BlobStore& store, const std::string& bytes) {
  return store.FindMissing({Sha256Hex(bytes)}).empty();
}

class BlobStoreTest : public ::testing::Test {
 protected:
  BlobStoreTest() { store_.SetCapacity(kCapacity); }

  BlobStore store_;
  const std::string a_ = std::string(40, 'a'), b_ = std::string(40, 'b'), c_ = std::string(40, 'c');
};

TEST(Sha256Test, IsThatOfTheStandard) {
  // FIPS 180-2, appendix B.1.
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_TRUE(CheckBlobDigest("d", Sha256Hex("abc")).ok());
  for (const std::string& bad : {std::string(), std::string(63, 'a'), std::string(64, 'A')}) {
    EXPECT_EQ(FieldPath(CheckBlobDigest("d", bad)), "d");
  }
}

TEST_F(BlobStoreTest, TheBlobThatWasUsedLeastRecentlyGoesFirst) {
  ASSERT_TRUE(Put(store_, a_).ok());
  ASSERT_TRUE(Put(store_, b_).ok());
  EXPECT_TRUE(Has(store_, a_));  // used now
  ASSERT_TRUE(Put(store_, c_).ok());
  EXPECT_THAT(store_.FindMissing({Sha256Hex(a_), Sha256Hex(b_), Sha256Hex(c_), Sha256Hex(b_)}),
              ElementsAre(Sha256Hex(b_)));
  const BlobStore::Stats stats = store_.stats();
  EXPECT_EQ(stats.capacity_bytes, kCapacity);
  EXPECT_EQ(stats.used_bytes, 80);
  EXPECT_EQ(stats.received_bytes, 120);
  EXPECT_EQ(stats.dropped_blobs, 1);
}

TEST_F(BlobStoreTest, SmallBlobsTakeTheirPlacesToo) {
  const int64_t capacity = 128 << 10;
  store_.SetCapacity(capacity);
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(Put(store_, absl::StrCat("blob ", i)).ok());
  EXPECT_EQ(store_.stats().dropped_blobs, 1000 - capacity / 1024);
  EXPECT_TRUE(Has(store_, "blob 999"));
  EXPECT_FALSE(Has(store_, "blob 0"));
}

TEST_F(BlobStoreTest, ABlobThatARequestHoldsStays) {
  ASSERT_TRUE(Put(store_, a_).ok());
  ASSERT_TRUE(Put(store_, b_).ok());
  Blobs held;
  ASSERT_TRUE(store_.Collect({Named(a_)}, held).ok());
  EXPECT_EQ(*held.at(Sha256Hex(a_)), a_);
  ASSERT_TRUE(Put(store_, c_).ok());
  EXPECT_TRUE(Has(store_, a_));
  EXPECT_FALSE(Has(store_, b_));
  ASSERT_TRUE(store_.Collect({Named(c_)}, held).ok());
  absl::Status full = Put(store_, b_);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(full).has_value());
  EXPECT_THAT(std::string(full.message()), HasSubstr("server.blob_cache_bytes"));
  held.clear();
  EXPECT_TRUE(Put(store_, b_).ok());
}

TEST_F(BlobStoreTest, MissingBlobsAreAllNamed) {
  ASSERT_TRUE(Put(store_, a_).ok());
  Blobs blobs;
  const absl::Status status = store_.Collect({Named(a_), Named(b_), Named(c_)}, blobs);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasReason(status, reason::kBlobMissing));
  EXPECT_EQ(FieldPath(status), "vision_inputs[1].digest");
  EXPECT_THAT(std::string(status.message()), HasSubstr(Sha256Hex(b_)));
  EXPECT_THAT(std::string(status.message()), HasSubstr(Sha256Hex(c_)));
}

TEST_F(BlobStoreTest, WrongBytesAndSizesAreRefused) {
  auto upload = store_.Begin(Sha256Hex(a_), 40);
  ASSERT_TRUE(upload.ok());
  ASSERT_TRUE((*upload)->Append(b_).ok());
  EXPECT_EQ((*upload)->Append("x").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*upload)->Finish().code(), absl::StatusCode::kDataLoss);
  upload = store_.Begin(Sha256Hex(a_), 40);
  ASSERT_TRUE((*upload)->Append(a_.substr(1)).ok());
  EXPECT_EQ((*upload)->Finish().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*upload)->Append("").code(), absl::StatusCode::kInvalidArgument);
  upload->reset();
  EXPECT_EQ(store_.stats().used_bytes, 0) << "what came of an upload that ended is given back";
  EXPECT_EQ(FieldPath(store_.Begin(Sha256Hex(a_), kCapacity + 1).status()), "total_bytes");
  EXPECT_EQ(FieldPath(store_.Begin(Sha256Hex(a_), 0).status()), "total_bytes");
  EXPECT_EQ(FieldPath(store_.Begin("a", 1).status()), "digest");
}

TEST_F(BlobStoreTest, ABlobThatComesTwiceIsKeptOnce) {
  auto upload = store_.Begin(Sha256Hex(a_), 40);
  ASSERT_TRUE((*upload)->Append(a_).ok());
  ASSERT_TRUE(Put(store_, a_).ok());
  EXPECT_TRUE((*upload)->Finish().ok());
  upload->reset();
  EXPECT_EQ(store_.stats().used_bytes, 40);
}

TEST(EmptyBlobStoreTest, AServerWithoutImagesTakesNone) {
  BlobStore store;
  const absl::Status status = store.Begin(Sha256Hex("a"), 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasReason(status, reason::kNoImages));
  Blobs blobs;
  EXPECT_EQ(FieldPath(store.Collect({Named("a")}, blobs)), "vision_inputs");
  EXPECT_TRUE(store.Collect({}, blobs).ok());
}

// The service over a real connection.
class BlobServiceTest : public ::testing::Test {
 protected:
  class App final : public ServerApp {
   public:
    explicit App(ServerRuntime& runtime) : service_(runtime.executor, store_) {
      store_.SetCapacity(8 << 20);
    }
    std::vector<NamedService> services() override {
      return {{blobs::v1::BlobService::service_full_name(), &service_}};
    }
    absl::Status Load() override { return absl::OkStatus(); }
    BlobStore& store() { return store_; }

   private:
    BlobStore store_;
    BlobService service_;
  };

  BlobStore& store() { return static_cast<App&>(server_.app()).store(); }
  // Sends one header, then the chunk.
  absl::Status Upload(const std::string& digest, int64_t total_bytes, const std::string& chunk) {
    grpc::ClientContext context;
    blobs::v1::UploadBlobResponse response;
    const auto stream = stub_->UploadBlob(&context, &response);
    blobs::v1::UploadBlobRequest message;
    message.mutable_header()->set_digest(digest);
    message.mutable_header()->set_total_bytes(total_bytes);
    stream->Write(message);
    message.set_chunk(chunk);
    stream->Write(message);
    stream->WritesDone();
    return FromGrpcStatus(stream->Finish());
  }

  TestServer server_{[](ServerRuntime& runtime) { return std::make_unique<App>(runtime); }};
  std::unique_ptr<blobs::v1::BlobService::Stub> stub_ =
      blobs::v1::BlobService::NewStub(server_.channel());
};

TEST_F(BlobServiceTest, SendersUploadWhatIsMissing) {
  Blobs blobs;
  for (const size_t size : {size_t{5}, size_t{BlobStore::kMaxChunkBytes + 7}}) {
    const std::string bytes(size, 'x');
    blobs[Sha256Hex(bytes)] = std::make_shared<const std::string>(bytes);
  }
  ASSERT_TRUE(SendMissingBlobs({}, absl::Minutes(1), blobs, *stub_).ok());
  for (const auto& [digest, blob] : blobs) EXPECT_THAT(store().FindMissing({digest}), IsEmpty());
  const int64_t used = store().stats().used_bytes;
  ASSERT_TRUE(SendMissingBlobs({}, absl::Minutes(1), blobs, *stub_).ok());
  EXPECT_EQ(store().stats().used_bytes, used);
}

TEST_F(BlobServiceTest, ACallIsRepeatedOnceIfTheReceiverDroppedABlob) {
  const std::string bytes = "pixels";
  const Blobs blobs = {{Sha256Hex(bytes), std::make_shared<const std::string>(bytes)}};
  int calls = 0;
  const auto call = [&]() -> absl::StatusOr<int> {
    ++calls;
    return WithReason(absl::FailedPreconditionError("gone"), reason::kBlobMissing);
  };
  const absl::StatusOr<int> result = CallWithBlobs({}, absl::Minutes(1), blobs, *stub_, call);
  EXPECT_TRUE(HasReason(result.status(), reason::kBlobMissing));
  EXPECT_EQ(calls, 2);
}

TEST_F(BlobServiceTest, BadUploadsAreRefusedByName) {
  absl::Status status = Upload(Sha256Hex("right"), 5, "wrong");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  status = Upload("A", 5, "right");
  EXPECT_EQ(FieldPath(status), "header.digest");
  status = Upload(Sha256Hex("right"), 9 << 20, "right");
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldPath(status), "header.total_bytes");
  status = Upload(Sha256Hex("right"), 5 << 20, std::string(BlobStore::kMaxChunkBytes + 1, 'x'));
  EXPECT_EQ(FieldPath(status), "chunk");
  EXPECT_EQ(store().stats().used_bytes, 0);

  grpc::ClientContext context;
  blobs::v1::FindMissingBlobsRequest request;
  request.add_digests("no digest");
  blobs::v1::FindMissingBlobsResponse response;
  EXPECT_EQ(FieldPath(FromGrpcStatus(stub_->FindMissingBlobs(&context, request, &response))),
            "digests[0]");
}

}  // namespace
}  // namespace tandem::rpc
