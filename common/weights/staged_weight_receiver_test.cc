#include "common/weights/staged_weight_receiver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <limits>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/weights/testing/stream_digest.h"
#include "common/weights/testing/told_weights.h"

namespace tandem {
namespace {

std::vector<std::byte> Bytes(int count, int start = 0) {
  std::vector<std::byte> bytes(count);
  for (int i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(start + i);
  return bytes;
}

class StagedWeightReceiverTest : public ::testing::Test {
 protected:
  StagedWeightReceiverTest()
      : receiver_({{.name = "a", .shape = {2, 3}},
                   {.name = "b", .dtype = DType::kBFloat16, .shape = {4}}},
                  WeightSpec{.name = "head", .shape = {2, 3}}, /*num_token_ids=*/7,
                  {.version = 0, .digest = "start"}, Tell(told_)) {}

  WeightManifest Manifest(int64_t version = 1) const { return ManifestOf(stream_, version); }
  static WeightManifest ManifestOf(const std::vector<std::byte>& stream, int64_t version = 1) {
    const std::vector<WeightSpec> tensors = {
        {.name = "a", .shape = {2, 3}}, {.name = "b", .dtype = DType::kBFloat16, .shape = {4}}};
    const std::string sent = StreamDigest(tensors, stream);
    return {.version = version,
            .tensors = tensors,
            .total_bytes = 32,
            .chunk_bytes = 12,
            // Stands for the digest of the float32 values, which the receiver does not see.
            .digest = std::string(sent.rbegin(), sent.rend()),
            .num_token_ids = 7,
            .sent_digest = sent};
  }

  absl::Status SendAll(const std::string& id, const std::vector<std::byte>& stream) {
    for (int64_t chunk = 0; chunk < 3; ++chunk) {
      const auto sent = receiver_.Append(id, chunk, absl::MakeSpan(stream).subspan(chunk * 12, 12));
      if (!sent.ok()) return sent.status();
      EXPECT_EQ(*sent, chunk + 1);
    }
    return absl::OkStatus();
  }

  const std::vector<std::byte> stream_ = Bytes(32);
  Told told_;
  StagedWeightReceiver receiver_;
};

TEST_F(StagedWeightReceiverTest, AppliesWhatWasSentOnce) {
  EXPECT_EQ(*receiver_.Begin("u", Manifest(), false), 0);
  ASSERT_TRUE(receiver_.Append("u", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
  // The sender was interrupted, and the same update goes on.
  EXPECT_EQ(*receiver_.Begin("u", Manifest(), false), 1);
  ASSERT_TRUE(receiver_.Append("u", 1, absl::MakeSpan(stream_).subspan(12, 12)).ok());
  ASSERT_TRUE(receiver_.Append("u", 2, absl::MakeSpan(stream_).subspan(24)).ok());
  EXPECT_TRUE(told_.applied.empty());
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.Commit("u", {})->version, 1);
  EXPECT_EQ(told_.applied, stream_);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  told_.applied.clear();
  EXPECT_EQ(receiver_.Commit("u", {})->digest, Manifest().digest);
  EXPECT_TRUE(told_.applied.empty());
}

TEST_F(StagedWeightReceiverTest, ADifferentDigestIsDataLoss) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", Bytes(32, 1)).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(told_.applied.empty());
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StagedWeightReceiverTest, TheVersionHasTheDigestOfTheManifestAndTheBytesTheirOwn) {
  WeightManifest wrong = Manifest();
  wrong.sent_digest = wrong.digest;
  ASSERT_TRUE(receiver_.Begin("u", wrong, false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  const absl::Status status = receiver_.Commit("u", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(Manifest().sent_digest));
  EXPECT_TRUE(told_.applied.empty());
  ASSERT_TRUE(receiver_.Begin("v", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("v", stream_).ok());
  EXPECT_EQ(receiver_.Commit("v", {})->digest, Manifest().digest);
  EXPECT_EQ(receiver_.Version().digest, Manifest().digest);
}

// The digest is that of the adapters and of the rest of the model, which the receiver has.
TEST(AdapterReceiverTest, TheDigestCoversWhatStays) {
  const std::vector<WeightSpec> tensors = {{.name = "a", .shape = {2, 4}}};
  const std::vector<std::byte> stream = Bytes(32);
  TensorSums kept;
  kept.AddTensor("base", stream.data(), 16);
  TensorSums whole = kept;
  whole.AddTensor("a", stream.data(), 32);
  Told told;
  StagedWeightReceiver receiver(tensors, std::nullopt, /*num_token_ids=*/7, {}, Tell(told), {},
                                /*allow_not_finite=*/true,
                                {.settings = "rank 2, alpha 4", .kept = kept});
  WeightManifest manifest = {.version = 1,
                             .tensors = tensors,
                             .total_bytes = 32,
                             .digest = StreamDigest(tensors, stream),
                             .num_token_ids = 7,
                             .adapter = "rank 2, alpha 4"};
  const auto send = [&](const std::string& id) {
    EXPECT_TRUE(receiver.Begin(id, manifest, false).ok());
    EXPECT_TRUE(receiver.Append(id, 0, stream).ok());
    return receiver.Commit(id, {}).status();
  };
  EXPECT_EQ(send("u").code(), absl::StatusCode::kDataLoss);
  manifest.digest = whole.Digest();
  EXPECT_EQ(send("v"), absl::OkStatus());
  for (const std::string adapter : {"", "rank 2, alpha 5"}) {
    manifest.adapter = adapter;
    manifest.version = 2;
    EXPECT_EQ(FieldPath(receiver.Begin("w", manifest, false).status()), "manifest.adapter");
  }
}

TEST_F(StagedWeightReceiverTest, TensorsTravelAsFloat32OrInTheTypeThatIsWanted) {
  EXPECT_EQ(receiver_.WantedTypes(), (TensorTypes{{"b", DType::kBFloat16}}));
  const auto refused_field = [&](size_t tensor, DType dtype) {
    WeightManifest manifest = Manifest();
    manifest.total_bytes -= manifest.tensors[tensor].bytes();
    manifest.tensors[tensor].dtype = dtype;
    manifest.total_bytes += manifest.tensors[tensor].bytes();
    const absl::Status status = receiver_.Begin("u", manifest, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return FieldPath(status).value_or("");
  };
  EXPECT_EQ(refused_field(0, DType::kBFloat16), "manifest.tensors[0].dtype");
  EXPECT_EQ(refused_field(0, DType::kFloat64), "manifest.tensors[0].dtype");
  EXPECT_EQ(refused_field(1, DType::kFloat16), "manifest.tensors[1].dtype");

  WeightManifest wide = Manifest();
  wide.tensors[1].dtype = DType::kFloat32;
  wide.total_bytes = 40;
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wide, false).status()), "manifest.sent_digest")
      << "all are float32: the digest is theirs";
  const std::vector<std::byte> stream = Bytes(40);
  wide.digest = StreamDigest(wide.tensors, stream);
  wide.sent_digest.clear();
  wide.chunk_bytes = 40;
  ASSERT_TRUE(receiver_.Begin("u", wide, false).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, stream).ok());
  EXPECT_TRUE(receiver_.Commit("u", {}).ok());

  WeightManifest unknown = Manifest(2);
  unknown.sent_digest.clear();
  EXPECT_EQ(FieldPath(receiver_.Begin("v", unknown, false).status()), "manifest.sent_digest");
}

// As where a receiver was asked for its types by a sender of another time.
TEST_F(StagedWeightReceiverTest, AnUpdateInOtherTypesBeginsAnew) {
  ASSERT_EQ(*receiver_.Begin("u", Manifest(), false), 0);
  ASSERT_TRUE(receiver_.Append("u", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
  EXPECT_EQ(*receiver_.Begin("u", Manifest(), false), 1);
  WeightManifest wide = Manifest();
  wide.tensors[1].dtype = DType::kFloat32;
  wide.total_bytes = 40;
  wide.sent_digest.clear();
  EXPECT_EQ(*receiver_.Begin("u", wide, false), 0);
}

TEST_F(StagedWeightReceiverTest, ChunksMustBeInOrderAndInside) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  const absl::Status early = receiver_.Append("u", 1, Bytes(12)).status();
  EXPECT_EQ(FieldPath(early), "chunk_index");
  EXPECT_EQ(Reason(early), "CHUNK_OUT_OF_ORDER");
  EXPECT_EQ(FieldPath(receiver_.Append("u", 0, Bytes(13)).status()), "data");
  EXPECT_EQ(FieldPath(receiver_.Append("u", 0, {}).status()), "data");
  EXPECT_EQ(receiver_.Append("v", 0, Bytes(12)).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_EQ(FieldPath(receiver_.Append("u", 2, Bytes(8)).status()), "chunk_index") << "a repeat";
  EXPECT_EQ(FieldPath(receiver_.Append("u", 3, Bytes(12)).status()), "data") << "past the end";
}

TEST_F(StagedWeightReceiverTest, WhatIsIncompleteCannotBeCommitted) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, Bytes(12)).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(StagedWeightReceiverTest, OlderVersionsAreStaleAndNewerOnesReplace) {
  EXPECT_EQ(Reason(receiver_.Begin("u", Manifest(0), false).status()), "STALE_WEIGHT_VERSION");
  ASSERT_TRUE(receiver_.Begin("u", Manifest(5), false).ok());
  EXPECT_EQ(Reason(receiver_.Begin("v", Manifest(4), false).status()), "STALE_WEIGHT_VERSION");
  ASSERT_TRUE(receiver_.Begin("w", Manifest(6), false).ok());
  EXPECT_EQ(receiver_.OpenUpdateId(), "w");
  EXPECT_TRUE(receiver_.Abort("w").ok());
  EXPECT_EQ(receiver_.Abort("w").code(), absl::StatusCode::kNotFound);
}

TEST_F(StagedWeightReceiverTest, ARollbackIsTakenOnlyWhenItIsAskedFor) {
  ASSERT_TRUE(receiver_.Begin("five", Manifest(5), false).ok());
  ASSERT_TRUE(SendAll("five", stream_).ok());
  ASSERT_EQ(receiver_.Commit("five", {})->version, 5);
  EXPECT_EQ(Reason(receiver_.Begin("three", Manifest(3), false).status()), "STALE_WEIGHT_VERSION");
  ASSERT_EQ(*receiver_.Begin("three", Manifest(3), true), 0);
  ASSERT_TRUE(SendAll("three", stream_).ok());
  EXPECT_EQ(receiver_.Commit("three", {})->version, 3);
  ASSERT_TRUE(receiver_.Begin("four", Manifest(4), false).ok());
  ASSERT_TRUE(SendAll("four", stream_).ok());
  EXPECT_EQ(receiver_.Commit("four", {})->version, 4);
}

// A version number with another digest is another lineage.
TEST_F(StagedWeightReceiverTest, OtherWeightsOfTheServedVersionNeedTheFlag) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("u", {}).ok());
  const std::vector<std::byte> others = Bytes(32, 1);
  const WeightManifest manifest = ManifestOf(others);
  EXPECT_EQ(Reason(receiver_.Begin("v", manifest, false).status()), "STALE_WEIGHT_VERSION");
  ASSERT_TRUE(receiver_.Begin("v", manifest, true).ok());
  ASSERT_TRUE(SendAll("v", others).ok());
  EXPECT_EQ(receiver_.Commit("v", {})->digest, manifest.digest);
}

TEST_F(StagedWeightReceiverTest, WeightsThatAreServedNeedNoTransfer) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("u", {}).ok());
  told_.applied.clear();
  for (const bool allow_rollback : {false, true}) {
    EXPECT_EQ(*receiver_.Begin("again", Manifest(), allow_rollback), Manifest().num_chunks());
    EXPECT_EQ(receiver_.Commit("again", {})->version, 1);
  }
  EXPECT_TRUE(told_.applied.empty());
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
}

// The sender of the replaced update learns that it is gone, and begins it again.
TEST_F(StagedWeightReceiverTest, AnUpdateThatARollbackReplacedDoesNotComeBack) {
  ASSERT_TRUE(receiver_.Begin("five", Manifest(5), false).ok());
  ASSERT_TRUE(SendAll("five", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("five", {}).ok());
  ASSERT_TRUE(receiver_.Begin("six", Manifest(6), false).ok());
  ASSERT_TRUE(receiver_.Begin("three", Manifest(3), true).ok());
  EXPECT_EQ(Reason(receiver_.Commit("six", {}).status()), "UPDATE_REPLACED");
  ASSERT_TRUE(SendAll("three", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("three", {}).ok());
  EXPECT_EQ(Reason(receiver_.Begin("six", Manifest(6), false).status()), "STALE_WEIGHT_VERSION");
  // The new lineage arrives at the same weights later.
  ASSERT_TRUE(receiver_.Begin("four", Manifest(4), false).ok());
  ASSERT_TRUE(SendAll("four", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("four", {}).ok());
  EXPECT_TRUE(receiver_.Begin("six", Manifest(6), false).ok());
}

TEST_F(StagedWeightReceiverTest, AReusedIdCommitsTheNewUpdate) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(1), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  ASSERT_EQ(receiver_.Commit("u", {})->version, 1);
  ASSERT_TRUE(receiver_.Begin("u", Manifest(2), false).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_EQ(receiver_.Commit("u", {})->version, 2);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
}

TEST_F(StagedWeightReceiverTest, AnotherChunkSizeIsAnotherUpdate) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, Bytes(12)).ok());
  WeightManifest halves = Manifest();
  halves.chunk_bytes = 16;
  EXPECT_EQ(*receiver_.Begin("u", halves, false), 0);
}

TEST_F(StagedWeightReceiverTest, ManifestsThatDoNotFitAreNamed) {
  WeightManifest wrong = Manifest();
  wrong.tensors[1].shape = {5};
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.tensors[1].shape");
  wrong = Manifest();
  wrong.tensors[1].name = "c";
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.tensors[1].name");
  wrong = Manifest();
  wrong.tensors.pop_back();
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.tensors");
  wrong = Manifest();
  wrong.tensors.push_back(wrong.tensors[0]);
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.tensors[2].name");
  wrong = Manifest();
  wrong.tensors[0].dtype = DType::kInt32;
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.tensors[0].dtype");
  wrong = Manifest();
  wrong.total_bytes = 31;
  EXPECT_EQ(FieldPath(receiver_.Begin("u", wrong, false).status()), "manifest.total_bytes");
  EXPECT_EQ(FieldPath(receiver_.Begin("", Manifest(), false).status()), "update_id");
}

TEST_F(StagedWeightReceiverTest, ATiedHeadMayBeSent) {
  WeightManifest manifest = Manifest();
  manifest.tensors.push_back({.name = "head", .shape = {2, 3}});
  manifest.total_bytes += 24;
  EXPECT_TRUE(receiver_.Begin("u", manifest, false).ok());
}

TEST_F(StagedWeightReceiverTest, AFailedSwapKeepsTheVersion) {
  told_.apply_status = absl::InternalError("no");
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
}

TEST_F(StagedWeightReceiverTest, TensorsAreAddedBesideTheCallsThatBringThem) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  ASSERT_TRUE(receiver_.Commit("u", {}).ok());
  EXPECT_NE(told_.adder, std::this_thread::get_id());
  EXPECT_NE(told_.adder, std::thread::id()) << "never added";
  EXPECT_EQ(told_.alive, 0) << "its memory goes when the swap is over";
}

TEST_F(StagedWeightReceiverTest, ATensorThatIsRefusedEndsTheUpdateAtItsCommit) {
  told_.add_status = absl::InvalidArgumentError("no");
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().message(), "no");
  EXPECT_TRUE(told_.applied.empty());
  EXPECT_EQ(receiver_.Version().version, 0);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  EXPECT_EQ(told_.alive, 0);
}

TEST_F(StagedWeightReceiverTest, AnAbandonedUpdateLeavesNothing) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(5), false).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
  ASSERT_TRUE(receiver_.Begin("w", Manifest(6), false).ok());
  EXPECT_EQ(told_.alive, 1) << "the one that was replaced has ended";
  ASSERT_TRUE(receiver_.Abort("w").ok());
  EXPECT_EQ(told_.alive, 0);
  EXPECT_TRUE(told_.applied.empty());
}

// Two trainers that publish to one server must hear of each other.
TEST_F(StagedWeightReceiverTest, TheSenderOfAReplacedUpdateLearnsWhatReplacedIt) {
  ASSERT_TRUE(receiver_.Begin("ours", Manifest(1), false).ok());
  ASSERT_TRUE(receiver_.Append("ours", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
  const std::vector<std::byte> others = Bytes(32, 1);
  ASSERT_TRUE(receiver_.Begin("theirs", ManifestOf(others), false).ok());
  const absl::Status chunk =
      receiver_.Append("ours", 1, absl::MakeSpan(stream_).subspan(12, 12)).status();
  EXPECT_EQ(chunk.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Reason(chunk), "UPDATE_REPLACED");
  EXPECT_THAT(std::string(chunk.message()), testing::HasSubstr("\"theirs\" to version 1"));
  EXPECT_EQ(receiver_.Commit("ours", {}).status(), chunk);
  EXPECT_EQ(receiver_.Abort("ours"), chunk);
  ASSERT_TRUE(SendAll("theirs", others).ok());
  EXPECT_TRUE(receiver_.Commit("theirs", {}).ok());
  // One that was begun again is open again.
  ASSERT_EQ(*receiver_.Begin("ours", Manifest(2), false), 0);
  EXPECT_TRUE(receiver_.Append("ours", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
}

TEST_F(StagedWeightReceiverTest, AnUpdateWithoutASenderIsDroppedInTheEnd) {
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(receiver_.Append("u", 0, absl::MakeSpan(stream_).subspan(0, 12)).ok());
  const SteadyTime now = SteadyTime::Now();
  receiver_.DropAbandoned(now + kAbandonedAfter - absl::Minutes(1));
  EXPECT_EQ(receiver_.OpenUpdateId(), "u");
  receiver_.DropAbandoned(now + kAbandonedAfter + absl::Minutes(1));
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  EXPECT_EQ(told_.alive, 0) << "its memory is free";
  // A sender that comes back begins again.
  EXPECT_EQ(receiver_.Append("u", 1, absl::MakeSpan(stream_).subspan(12, 12)).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_EQ(*receiver_.Begin("u", Manifest(), false), 0);
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_TRUE(receiver_.Commit("u", {}).ok());
}

TEST_F(StagedWeightReceiverTest, WeightsThatAreNotFiniteAreNotServed) {
  const uint32_t nan = 0x7fc00000, infinity = 0xff800000;
  const uint16_t half = 0x7f80;
  const auto with = [&](size_t place, const void* value, size_t size) {
    std::vector<std::byte> stream = stream_;
    std::memcpy(stream.data() + place, value, size);
    return stream;
  };
  int version = 0;
  for (const auto& [stream, text] : std::vector<std::pair<std::vector<std::byte>, std::string>>{
           {with(8, &nan, 4), "\"a\" is not finite at value 2"},
           {with(0, &infinity, 4), "\"a\" is not finite at value 0"},
           {with(30, &half, 2), "\"b\" is not finite at value 3"}}) {
    ASSERT_TRUE(receiver_.Begin("u", ManifestOf(stream, ++version), false).ok());
    ASSERT_TRUE(SendAll("u", stream).ok());
    const absl::Status refused = receiver_.Commit("u", {}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Reason(refused), "WEIGHTS_NOT_FINITE");
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(text));
    EXPECT_EQ(receiver_.Version().version, 0);
    EXPECT_EQ(receiver_.OpenUpdateId(), "");
    EXPECT_TRUE(told_.applied.empty());
  }
  StagedWeightReceiver careless(
      {{.name = "a", .shape = {2, 3}}, {.name = "b", .dtype = DType::kBFloat16, .shape = {4}}},
      std::nullopt, /*num_token_ids=*/7, {.version = 0, .digest = ""}, Tell(told_), {},
      /*allow_not_finite=*/true);
  const std::vector<std::byte> stream = with(8, &nan, 4);
  ASSERT_TRUE(careless.Begin("u", ManifestOf(stream), false).ok());
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    ASSERT_TRUE(careless.Append("u", chunk, absl::MakeSpan(stream).subspan(chunk * 12, 12)).ok());
  }
  EXPECT_EQ(careless.Commit("u", {})->version, 1);
}

// Tensors that the engine reads in memory of a GPU.
class GpuReceiverTest : public testing::Test {
 protected:
  // Sends `bytes` as memory of a GPU, with the digest of `manifest`.
  absl::Status Send(StagedWeightReceiver& receiver, const WeightManifest& manifest,
                    const std::string& bytes) {
    EXPECT_TRUE(receiver.Begin("u", manifest, false).ok());
    const auto memory = std::make_shared<const FakeGpuMemory>(bytes);
    const std::vector<FileRange> all = {{.offset = 0, .size = 32}};
    EXPECT_TRUE(receiver.AppendShared("u", 0, memory, all).ok());
    return receiver.Commit("u", {}).status();
  }
  WeightManifest ManifestOf(const std::string& bytes) {
    const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
    return {.version = 1,
            .tensors = tensors_,
            .total_bytes = 32,
            .digest = StreamDigest(tensors_, {data, bytes.size()}),
            .num_token_ids = 7};
  }

  const std::vector<WeightSpec> tensors_ = {{.name = "a", .shape = {6}},
                                            {.name = "b", .shape = {2}}};
  Told told_;
  StagedWeightReceiver receiver_{tensors_, std::nullopt, /*num_token_ids=*/7, {}, Tell(told_)};
};

TEST_F(GpuReceiverTest, ACommitThatIsRepeatedAddsThemUpOnce) {
  const std::string bytes = "0123456789abcdefghijklmnopqrstuv";
  told_.apply_status = absl::CancelledError("the caller left");
  EXPECT_EQ(Send(receiver_, ManifestOf(bytes), bytes).code(), absl::StatusCode::kCancelled);
  told_.apply_status = absl::OkStatus();
  EXPECT_EQ(receiver_.Commit("u", {})->version, 1);
  EXPECT_EQ(told_.shared, 2);
  EXPECT_EQ(told_.applied.size(), 32U);
}

TEST_F(GpuReceiverTest, TheyAreComparedWithTheDigest) {
  const std::string bytes = "0123456789abcdefghijklmnopqrstuv",
                    other = "0123456789abcdefghijklmnopqrstuw";
  EXPECT_EQ(Send(receiver_, ManifestOf(bytes), other).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver_.OpenUpdateId(), "");
  EXPECT_TRUE(told_.applied.empty());
}

TEST_F(GpuReceiverTest, ValuesThatAreNotFiniteAreRefused) {
  std::string bytes(32, '0');
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + 28, &nan, 4);
  const absl::Status refused = Send(receiver_, ManifestOf(bytes), bytes);
  EXPECT_EQ(Reason(refused), "WEIGHTS_NOT_FINITE");
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("\"b\" is not finite at value 1"));
  EXPECT_TRUE(told_.applied.empty());
  StagedWeightReceiver careless(tensors_, std::nullopt, /*num_token_ids=*/7, {}, Tell(told_), {},
                                /*allow_not_finite=*/true);
  EXPECT_TRUE(Send(careless, ManifestOf(bytes), bytes).ok());
}

// Takes a tensor when it is told to.
class SlowWeights : public NextWeights {
 public:
  SlowWeights(std::latch& taking, std::latch& go) : taking_(taking), go_(go) {}
  absl::Status Add(const WeightSpec&, TensorBytes) override {
    taking_.count_down();
    go_.wait();
    return absl::OkStatus();
  }
  absl::Status Apply(const WeightManifest&, const CallScope&) override { return absl::OkStatus(); }

 private:
  std::latch &taking_, &go_;
};

TEST_F(StagedWeightReceiverTest, OtherCallsDoNotWaitForTheTensorOfAnUpdateThatIsReplaced) {
  std::latch taking(1), go(1);
  StagedWeightReceiver receiver(
      {{.name = "a", .shape = {2, 3}}, {.name = "b", .dtype = DType::kBFloat16, .shape = {4}}},
      std::nullopt, /*num_token_ids=*/7, {.version = 0, .digest = ""},
      [&] { return std::make_unique<SlowWeights>(taking, go); });
  ASSERT_TRUE(receiver.Begin("u", Manifest(5), false).ok());
  for (const int64_t chunk : {0, 1}) {  // the whole of "a"
    ASSERT_TRUE(receiver.Append("u", chunk, absl::MakeSpan(stream_).subspan(chunk * 12, 12)).ok());
  }
  taking.wait();
  std::thread next([&] { EXPECT_TRUE(receiver.Begin("w", Manifest(6), false).ok()); });
  while (receiver.OpenUpdateId() != "w") std::this_thread::yield();
  EXPECT_EQ(receiver.Version().version, 0);
  go.count_down();
  next.join();
}

// A sender whose connection is lost commits again and again: the calls before the last one have no
// caller any more, and a server has few threads for calls.
TEST_F(StagedWeightReceiverTest, OfTheRepeatsOfACommitOnlyTheLastWaits) {
  std::latch taking(1), go(1);
  StagedWeightReceiver receiver({{.name = "a", .shape = {2, 3}}}, std::nullopt,
                                /*num_token_ids=*/7, {.version = 0, .digest = ""},
                                [&] { return std::make_unique<SlowWeights>(taking, go); });
  const std::vector<WeightSpec> tensors = {{.name = "a", .shape = {2, 3}}};
  const std::vector<std::byte> stream = Bytes(24);
  ASSERT_TRUE(receiver
                  .Begin("u",
                         {.version = 1,
                          .tensors = tensors,
                          .total_bytes = 24,
                          .digest = StreamDigest(tensors, stream),
                          .num_token_ids = 7},
                         false)
                  .ok());
  ASSERT_TRUE(receiver.Append("u", 0, stream).ok());
  taking.wait();
  std::thread first([&] { EXPECT_EQ(receiver.Commit("u", {})->version, 1); });
  // The first commits as soon as no other call may touch the update.
  while (receiver.Append("u", 1, stream).status().code() != absl::StatusCode::kFailedPrecondition) {
    std::this_thread::yield();
  }
  std::vector<std::thread> repeats;
  std::atomic<int> let_go = 0;
  constexpr int kRepeats = 4;
  for (int i = 0; i < kRepeats; ++i) {
    repeats.emplace_back([&] {
      const auto version = receiver.Commit("u", {});
      if (version.ok()) {
        EXPECT_EQ(version->version, 1);
      } else {
        EXPECT_EQ(version.status().code(), absl::StatusCode::kUnavailable);
        ++let_go;
      }
    });
  }
  while (let_go < kRepeats - 1) std::this_thread::yield();
  std::stop_source gone;
  CallScope call;
  call.cancellation = gone.get_token();
  gone.request_stop();
  EXPECT_EQ(receiver.Commit("u", call).status().code(), absl::StatusCode::kCancelled);
  go.count_down();
  first.join();
  for (std::thread& repeat : repeats) repeat.join();
}

TEST_F(StagedWeightReceiverTest, ACommitWhoseTurnDidNotComeCanBeRepeated) {
  told_.apply_status = absl::DeadlineExceededError("the deadline has passed");
  ASSERT_TRUE(receiver_.Begin("u", Manifest(), false).ok());
  ASSERT_TRUE(SendAll("u", stream_).ok());
  EXPECT_EQ(receiver_.Commit("u", {}).status().code(), absl::StatusCode::kDeadlineExceeded);
  told_.apply_status = absl::OkStatus();
  EXPECT_EQ(receiver_.Commit("u", {})->version, 1);
}

// A receiver whose model has a speculator with one tensor of 8 bytes, behind the model's 32.
class ReceivedComponentTest : public ::testing::Test {
 protected:
  static constexpr char kConfig[] = R"({"n_predict":3})";

  ReceivedComponentTest()
      : receiver_({{.name = "a", .shape = {8}}}, std::nullopt, /*num_token_ids=*/7,
                  {.version = 0, .digest = "start"}, Tell(told_),
                  {{.name = kSpeculatorComponent,
                    .config = kConfig,
                    .parameters = {{.name = "speculator.h", .shape = {2}}},
                    .initial = {.version = 0, .digest = "heads"}}}) {}

  static std::string DigestOf(const std::vector<std::byte>& stream, size_t begin, size_t end) {
    const WeightSpec model = {.name = "a", .shape = {8}},
                     heads = {.name = "speculator.h", .shape = {2}};
    return StreamDigest({end - begin == 32 ? model : heads},
                        absl::MakeSpan(stream).subspan(begin, end - begin));
  }
  WeightManifest Manifest(int64_t version = 1) const {
    return {.version = version,
            .tensors = {{.name = "a", .shape = {8}}, {.name = "speculator.h", .shape = {2}}},
            .total_bytes = 40,
            .chunk_bytes = 12,
            .digest = DigestOf(stream_, 0, 32),
            .num_token_ids = 7,
            .components = {{.name = kSpeculatorComponent,
                            .config = kConfig,
                            .digest = DigestOf(stream_, 32, 40)}}};
  }
  absl::StatusOr<WeightsVersion> Send(const WeightManifest& manifest,
                                      const std::vector<std::byte>& stream) {
    absl::Status begun = receiver_.Begin("u", manifest, false).status();
    if (!begun.ok()) return begun;
    const auto bytes = absl::MakeSpan(stream).first(manifest.total_bytes);
    for (int64_t chunk = 0; chunk < manifest.num_chunks(); ++chunk) {
      const auto sent = receiver_.Append("u", chunk, bytes.subspan(chunk * 12, 12));
      if (!sent.ok()) return sent.status();
    }
    return receiver_.Commit("u", {});
  }
  absl::Status Refusal(const WeightManifest& manifest) {
    absl::Status status = receiver_.Begin("u", manifest, false).status();
    EXPECT_EQ(receiver_.OpenUpdateId(), "");
    return status;
  }

  const std::vector<std::byte> stream_ = Bytes(40);
  Told told_;
  StagedWeightReceiver receiver_;
};

TEST_F(ReceivedComponentTest, TheSpeculatorMovesWithItsModel) {
  EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->digest, "heads");
  const auto committed = Send(Manifest(), stream_);
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(*committed, (WeightsVersion{1, DigestOf(stream_, 0, 32)}));
  EXPECT_EQ(*receiver_.ComponentVersion(kSpeculatorComponent),
            (WeightsVersion{1, DigestOf(stream_, 32, 40)}));
  EXPECT_EQ(told_.applied, stream_);
}

TEST_F(ReceivedComponentTest, AnUpdateOfTheModelAloneLeavesIt) {
  ASSERT_TRUE(Send(Manifest(), stream_).ok());
  const WeightManifest alone = Manifest(2).Without(kSpeculatorComponent);
  EXPECT_EQ(alone.total_bytes, 32);
  EXPECT_EQ(alone.digest, Manifest().digest) << "the digest is that of the model";
  ASSERT_TRUE(Send(alone, stream_).ok());
  EXPECT_EQ(receiver_.Version().version, 2);
  EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->version, 1);
}

TEST_F(ReceivedComponentTest, TheServedModelMayComeWithAnotherSpeculator) {
  ASSERT_TRUE(Send(Manifest().Without(kSpeculatorComponent), stream_).ok());
  EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->version, 0);
  ASSERT_TRUE(Send(Manifest(), stream_).ok());
  EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->version, 1);
  told_.applied.clear();
  EXPECT_EQ(*receiver_.Begin("again", Manifest(), false), Manifest().num_chunks());
  EXPECT_TRUE(receiver_.Commit("again", {}).ok());
  EXPECT_TRUE(told_.applied.empty()) << "both are served";
}

TEST_F(ReceivedComponentTest, AServedModelNeedsNotComeAgain) {
  ASSERT_TRUE(Send(Manifest(), stream_).ok());
  std::vector<std::byte> heads = Bytes(8, 100);
  WeightManifest manifest = Manifest(2).Without(kModelComponent);
  manifest.components[0].digest = DigestOf(heads, 0, 8);
  EXPECT_EQ(manifest.total_bytes, 8);
  ASSERT_TRUE(Send(manifest, heads).ok());
  EXPECT_EQ(told_.applied, heads);
  EXPECT_EQ(receiver_.Version(), (WeightsVersion{2, Manifest().digest}));
  EXPECT_EQ(*receiver_.ComponentVersion(kSpeculatorComponent),
            (WeightsVersion{2, DigestOf(heads, 0, 8)}));
  // A version alone.
  manifest = Manifest(3).Without(kSpeculatorComponent).Without(kModelComponent);
  EXPECT_EQ(manifest.num_chunks(), 0);
  ASSERT_TRUE(Send(manifest, {}).ok());
  EXPECT_EQ(receiver_.Version(), (WeightsVersion{3, Manifest().digest}));
  EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->version, 2);
}

TEST_F(ReceivedComponentTest, AModelThatIsNotServedMustCome) {
  const absl::Status status = Refusal(Manifest().Without(kModelComponent));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "manifest.tensors");
  ASSERT_TRUE(Send(Manifest(), stream_).ok());
  WeightManifest other = Manifest(2).Without(kModelComponent);
  other.digest = std::string(32, '0');
  EXPECT_EQ(FieldPath(Refusal(other)), "manifest.tensors");
  std::vector<std::byte> heads = Bytes(8, 100);
  EXPECT_EQ(Send(Manifest(2).Without(kModelComponent), heads).status().code(),
            absl::StatusCode::kDataLoss)
      << "the bytes of another speculator";
  EXPECT_EQ(receiver_.Version().version, 1);
}

TEST_F(ReceivedComponentTest, DamageOfEitherLeavesBothInForce) {
  for (const size_t damaged : {31, 32}) {
    std::vector<std::byte> stream = stream_;
    stream[damaged] ^= std::byte{1};
    const absl::Status status = Send(Manifest(), stream).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr(damaged == 32 ? "the speculator's weights" : "the weights"));
    EXPECT_EQ(receiver_.Version().version, 0);
    EXPECT_EQ(receiver_.ComponentVersion(kSpeculatorComponent)->version, 0);
    EXPECT_TRUE(told_.applied.empty());
  }
}

TEST_F(ReceivedComponentTest, ASpeculatorThatDoesNotFitIsRefusedByName) {
  WeightManifest manifest = Manifest();
  manifest.tensors[1].shape = {1, 2};
  const absl::Status shaped = Refusal(manifest);
  EXPECT_EQ(FieldPath(shaped), "manifest.tensors[1].shape");
  EXPECT_THAT(std::string(shaped.message()), testing::HasSubstr("speculator.h"));

  manifest = Manifest();
  manifest.tensors[1].name = "speculator.other";
  EXPECT_EQ(FieldPath(Refusal(manifest)), "manifest.tensors[1].name");

  manifest = Manifest();
  manifest.tensors.pop_back();
  manifest.total_bytes = 32;
  EXPECT_THAT(std::string(Refusal(manifest).message()), testing::HasSubstr("speculator.h"));

  manifest = Manifest();
  std::swap(manifest.tensors[0], manifest.tensors[1]);
  EXPECT_EQ(FieldPath(Refusal(manifest)), "manifest.tensors[1].name");

  manifest = Manifest();
  manifest.components[0].config = R"({"n_predict":2})";
  const absl::Status other = Refusal(manifest);
  EXPECT_EQ(FieldPath(other), "manifest.components[0].config");
  EXPECT_THAT(std::string(other.message()), testing::HasSubstr(kConfig));

  manifest = Manifest();
  manifest.components[0].name = "adapter";
  const absl::Status unknown = Refusal(manifest);
  EXPECT_EQ(FieldPath(unknown), "manifest.components[0].name");
  EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("\"adapter\""));

  // Tensors of a speculator that no manifest describes are no tensors of the model.
  manifest = Manifest();
  manifest.components.clear();
  EXPECT_EQ(FieldPath(Refusal(manifest)), "manifest.tensors[1].name");
  EXPECT_EQ(receiver_.Version().version, 0);
}

TEST(StagedWeightReceiverWithoutSpeculatorTest, ASpeculatorIsRefused) {
  Told told;
  StagedWeightReceiver receiver({{.name = "a", .shape = {1}}}, std::nullopt, /*num_token_ids=*/7,
                                {}, Tell(told));
  EXPECT_EQ(receiver.ComponentVersion(kSpeculatorComponent), std::nullopt);
  const WeightManifest manifest = {
      .version = 1,
      .tensors = {{.name = "a", .shape = {1}}, {.name = "speculator.h", .shape = {1}}},
      .total_bytes = 8,
      .digest = std::string(32, '0'),
      .num_token_ids = 7,
      .components = {
          {.name = kSpeculatorComponent, .config = "{}", .digest = std::string(32, '0')}}};
  EXPECT_EQ(FieldPath(receiver.Begin("u", manifest, false).status()),
            "manifest.components[0].name");
}

}  // namespace
}  // namespace tandem
