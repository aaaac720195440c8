#include "common/steps/training_state.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "common/base/errors/error.h"

namespace tandem::training {
namespace {

using nlohmann::json;

TEST(WeightsLineageTest, KnowsTheLastVersions) {
  WeightsLineage lineage(2);
  lineage.Record({0, "a"});
  lineage.Record({1, "b"});
  lineage.Record({2, "c"});
  EXPECT_EQ(lineage.DigestOf(0), "");
  EXPECT_EQ(lineage.DigestOf(1), "b");
  lineage.Record({2, "d"});
  EXPECT_EQ(lineage.DigestOf(2), "d");
}

TEST(KeptValuesTest, AStepKeepsValuesOfOneVersionAndOldStepsGo) {
  KeptValues kept(2);
  kept.Open("run", "a", {1, "x"}).by_sequence["s"] = {{0.1f}, 0.2f};
  EXPECT_EQ(kept.Find("run", "a")->by_sequence.at("s").final_value, 0.2f);
  EXPECT_EQ(kept.Find("other", "a"), nullptr);
  EXPECT_TRUE(kept.Open("run", "a", {2, "y"}).by_sequence.empty());
  kept.Open("run", "b", {2, "y"});
  kept.Open("run", "c", {2, "y"});
  EXPECT_EQ(kept.Find("run", "a"), nullptr);
  EXPECT_NE(kept.Find("run", "b"), nullptr);
}

TEST(KeptValuesTest, ADigestTellsPromptFromResponse) {
  const std::vector<int32_t> one = {1}, two = {1, 2}, tail = {2, 3}, last = {3};
  EXPECT_NE(KeptValues::SequenceDigest(one, tail), KeptValues::SequenceDigest(two, last));
}

TEST(KeptValuesTest, ADigestTellsImages) {
  const std::vector<int32_t> one = {1}, tail = {2, 3};
  const VisionReference image = {.digest = "a", .grid_t = 1, .grid_h = 2, .grid_w = 4};
  VisionReference turned = image;
  std::swap(turned.grid_h, turned.grid_w);
  const auto digest = [&](const std::vector<VisionReference>& images) {
    return KeptValues::SequenceDigest(one, tail, images);
  };
  EXPECT_NE(digest({image}), digest({}));
  EXPECT_NE(digest({image}), digest({turned}));
  EXPECT_EQ(digest({image, turned}), digest({image, turned}));
}

TEST(TrainingStateTest, SurvivesSerialisationExactly) {
  TrainingState state{.kind = "critic", .version = 3};
  state.ledger.Record("a", "d", {.run_id = "run", .step = 2, .weights = {3, ""}});
  state.lineage.Record({3, "digest"});
  state.kept_values.Open("run", "b", {3, "digest"}).by_sequence["s"] = {{0.1f, -1e-30f}, 1.0f / 3};
  const absl::StatusOr<TrainingState> copy =
      TrainingStateFromJson(json::parse(ToJson(state).dump()), state.kept_values.Bytes());
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->kind, "critic");
  EXPECT_EQ(copy->version, 3);
  EXPECT_TRUE(copy->ledger.Contains("run", "a"));
  EXPECT_EQ(copy->lineage.DigestOf(3), "digest");
  EXPECT_EQ(copy->kept_values.Find("run", "b")->by_sequence,
            state.kept_values.Find("run", "b")->by_sequence);
}

// Values take four bytes each, and not their decimal digits.
TEST(KeptValuesTest, ValuesAreStoredAsTheirBytes) {
  KeptValues kept;
  kept.Open("run", "a", {3, "digest"}).by_sequence["s"] = {{0.1f, -1e-30f, 1.0f / 3}, 2.5f};
  kept.Open("run", "a", {3, "digest"}).by_sequence["t"] = {{}, -0.25f};
  kept.Open("run", "b", {4, ""}).by_sequence["s"] = {{7}, 8};
  const std::string bytes = kept.Bytes();
  EXPECT_EQ(bytes.size(), 7 * sizeof(float));
  const json list = json::parse(kept.ToJson().dump());
  EXPECT_EQ(list.dump().find("0.1"), std::string::npos);
  KeptValues copy;
  ASSERT_TRUE(copy.FromJson(list, bytes).ok());
  EXPECT_EQ(copy.Find("run", "a")->by_sequence, kept.Find("run", "a")->by_sequence);
  EXPECT_EQ(copy.Find("run", "b")->by_sequence, kept.Find("run", "b")->by_sequence);
  EXPECT_EQ(copy.Bytes(), bytes);
  for (const std::string& other : {bytes.substr(4), bytes + bytes, bytes + "x", std::string()}) {
    EXPECT_EQ(copy.FromJson(list, other).code(), absl::StatusCode::kDataLoss) << other.size();
    EXPECT_EQ(copy.Bytes(), bytes) << "nothing has changed";
  }
  // A document of an earlier release.
  const json old = json::parse(R"([{"run_id": "r", "request_id": "a", "version": 3, "digest": "d",)"
                               R"( "sequences": {"s": {"values": [0.5, 2], "final_value": 1}}}])");
  ASSERT_TRUE(copy.FromJson(old, "").ok());
  EXPECT_EQ(copy.Find("r", "a")->by_sequence.at("s"), (SequenceValues{{0.5f, 2}, 1}));
}

TEST(TrainingStateTest, DamageIsDataLoss) {
  const json good = ToJson({.kind = "critic", .version = 3});
  for (const char* field : {"kind", "version", "done_steps", "lineage", "kept_values"}) {
    json damaged = good;
    damaged[field] = json::object({{"x", 1}});
    EXPECT_EQ(TrainingStateFromJson(damaged).status().code(), absl::StatusCode::kDataLoss) << field;
    damaged.erase(field);
    EXPECT_EQ(TrainingStateFromJson(damaged).status().code(), absl::StatusCode::kDataLoss) << field;
  }
  EXPECT_FALSE(TrainingStateFromJson(json::array()).ok());
}

TEST(TrainingStateTest, NumbersThatNoRunReachesAreDataLoss) {
  const json good = json::parse(ToJson({.kind = "critic", .version = 3}).dump());
  const auto expect_data_loss = [&](const char* field, const char* value) {
    json damaged = good;
    damaged[field] = json::parse(value);
    const absl::Status status = TrainingStateFromJson(damaged).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << field << " " << value << status;
  };
  for (const char* version : {"-5", "9223372036854775807", "9223372036854775808", "1e300", "1.5"}) {
    expect_data_loss("version", version);
  }
  expect_data_loss("lineage", R"([[-1, "digest"]])");
  expect_data_loss("lineage", R"([[1e300, "digest"]])");
  for (const char* values :
       {R"({"values": [1e39], "final_value": 0})", R"({"values": [], "final_value": -1e39})"}) {
    const std::string kept = std::string(
        R"([{"run_id": "r", "request_id": "a", "version": 3, "digest": "d", "sequences": {"s": )");
    expect_data_loss("kept_values", (kept + values + "}}]").c_str());
  }
  json largest = good;
  largest["version"] = int64_t{1} << 53;
  EXPECT_TRUE(TrainingStateFromJson(largest).ok());
}

TEST(StepNamesTest, AreGivenAndBounded) {
  const std::string longest(kMaxIdBytes, 'x'), longer(kMaxIdBytes + 1, 'x');
  EXPECT_TRUE(CheckStepNames(longest, longest).ok());
  EXPECT_EQ(FieldPath(CheckStepNames("", "a")), "run_id");
  EXPECT_EQ(FieldPath(CheckStepNames("run", "")), "request_id");
  EXPECT_EQ(FieldPath(CheckStepNames(longer, "a")), "run_id");
  EXPECT_EQ(FieldPath(CheckStepNames("run", longer)), "request_id");
  EXPECT_EQ(CheckIdLength("group_id", longer).message(),
            "group_id: has 257 bytes, at most 256 are allowed");
}

TEST(AdmitStepTest, IsDoneOnceAndOnlyOnItsWeights) {
  TrainingState state{.kind = "trainer", .version = 1};
  StepIdentity step{
      .run_id = "run", .step = 1, .request_id = "a", .payload_digest = "d", .expected_version = 0};
  EXPECT_EQ(Reason(AdmitStep(state, step).status()), "STALE_POLICY_VERSION");
  step.expected_version = 1;
  EXPECT_EQ(AdmitStep(state, step).value(), std::nullopt);
  state.ledger.Record("a", "d", {.run_id = "run", .step = 1, .weights = {2, ""}});
  state.version = 2;
  EXPECT_EQ(AdmitStep(state, step).value()->weights.version, 2);
  step.request_id = "";
  EXPECT_EQ(FieldPath(AdmitStep(state, step).status()), "request_id");
}

}  // namespace
}  // namespace tandem::training
