#include "services/rollout/engine/weight_receiver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/error.h"

namespace tandem::rollout {
namespace {

std::vector<std::byte> Bytes(int count, int start = 0) {
  std::vector<std::byte> bytes(count);
  for (int i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(start + i);
  return bytes;
}

class WeightReceiverTest : public ::testing::Test {
 protected:
  WeightReceiverTest()
      : receiver_({{.name = "a", .shape = {2, 3}}, {.name = "b", .shape = {4}}},
                  WeightSpec{.name = "head", .shape = {2, 3}}, {.version = 0, .digest = "start"},
                  [this](const WeightManifest&, absl::Span<const std::byte> stream) {
                    applied_.assign(stream.begin(), stream.end());
                    return apply_status_;
                  }) {}

  WeightManifest Manifest(int64_t version = 1) const {
    return {.version = version,
            .tensors = {{.name = "a", .shape = {2, 3}},
                        {.name = "b", .dtype = DType::kBFloat16, .shape = {4}}},
            .total_bytes = 32,
            .digest = Xxh3Hex(stream_.data(), stream_.size())};
  }

  const std::vector<std::byte> stream_ = Bytes(32);
  std::vector<std::byte> applied_;
  absl::Status apply_status_;
  StagedWeightReceiver receiver_;
};

TEST_F(WeightReceiverTest, AppliesWhatWasSentOnce) {
  EXPECT_EQ(*receiver_.Begin("u", Manifest()), 0);
  ASSERT_TRUE(receiver_.Append("u", 0, absl::MakeSpan(stream_).subspan(0, 10)).ok());
  // An interruption: the same update goes on.
  EXPECT_EQ(*receiver_.Begin("u", Manifest()), 10);
  ASSERT_TRUE(receiver_.Append("u", 10, absl::MakeSpan(stream_).subspan(10)).ok());
  EXPECT_TRUE(applied_.empty());
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.Commit("u")->version, 1);
  EXPECT_EQ(applied_, stream_);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  applied_.clear();
  EXPECT_EQ(receiver_.Commit("u")->digest, Manifest().digest);
  EXPECT_TRUE(applied_.empty());
}

TEST_F(WeightReceiverTest, ADifferentDigestIsDataLoss) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest()).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, Bytes(32, 1)).ok());
  EXPECT_EQ(receiver_.Commit("u").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(applied_.empty());
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.Commit("u").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(WeightReceiverTest, ChunksMustBeInOrderAndInside) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest()).ok());
  EXPECT_EQ(FieldPath(receiver_.Append("u", 4, Bytes(4))), "offset");
  EXPECT_EQ(receiver_.Append("u", 0, Bytes(33)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(receiver_.Append("v", 0, Bytes(4)).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(receiver_.Commit("u").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(WeightReceiverTest, OlderVersionsAreStaleAndNewerOnesReplace) {
  EXPECT_EQ(Reason(receiver_.Begin("u", Manifest(0)).status()), "STALE_WEIGHT_VERSION");
  ASSERT_TRUE(receiver_.Begin("u", Manifest(5)).ok());
  EXPECT_EQ(Reason(receiver_.Begin("v", Manifest(4)).status()), "STALE_WEIGHT_VERSION");
  ASSERT_TRUE(receiver_.Begin("w", Manifest(6)).ok());
  EXPECT_EQ(receiver_.OpenUpdateId(), "w");
  EXPECT_TRUE(receiver_.Abort("w").ok());
  EXPECT_EQ(receiver_.Abort("w").code(), absl::StatusCode::kNotFound);
}

TEST_F(WeightReceiverTest, ManifestsThatDoNotFitAreNamed) {
  WeightManifest wrong = Manifest();
  wrong.tensors[1].shape = {5};
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.tensors[1].shape");
  wrong = Manifest();
  wrong.tensors[1].name = "c";
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.tensors[1].name");
  wrong = Manifest();
  wrong.tensors.pop_back();
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.tensors");
  wrong = Manifest();
  wrong.tensors.push_back(wrong.tensors[0]);
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.tensors[2].name");
  wrong = Manifest();
  wrong.tensors[0].dtype = DType::kInt32;
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.tensors[0].dtype");
  wrong = Manifest();
  wrong.total_bytes = 31;
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong).status()), "manifest.total_bytes");
  EXPECT_EQ(FieldPath(receiver_.Begin("", Manifest()).status()), "update_id");
}

TEST_F(WeightReceiverTest, ATiedHeadMayBeSent) {
  WeightManifest manifest = Manifest();
  manifest.tensors.push_back({.name = "head", .shape = {2, 3}});
  manifest.total_bytes += 24;
  EXPECT_TRUE(receiver_.Begin("u", manifest).ok());
}

TEST_F(WeightReceiverTest, AFailedSwapKeepsTheVersion) {
  apply_status_ = absl::InternalError("no");
  ASSERT_TRUE(receiver_.Begin("u", Manifest()).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, stream_).ok());
  EXPECT_EQ(receiver_.Commit("u").status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
}

}  // namespace
}  // namespace tandem::rollout
