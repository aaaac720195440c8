#include "common/rpc/convert/proto_convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "common/base/errors/error.h"
#include "common/coauthoring/testing/authors.h"

namespace tandem::rpc {
namespace {

types::v1::Tensor Floats(std::vector<float> values) {
  types::v1::Tensor tensor;
  FloatsToProto(values, &tensor);
  return tensor;
}

Trajectory Example() {
  Trajectory t;
  t.prompt_token_ids = {5, 6};
  t.response_token_ids = {7, 8, 9};
  t.authorship_mask = Authors("SES");
  t.response_offset = 4;
  t.author_logprobs = {-0.5f, -1.0f, -1.5f};
  t.other_logprobs = {-2.0f, -2.5f, -3.0f};
  t.log_keep_mass = {0.0f, -0.1f, 0.0f};
  t.senior_versions = {{{3, "three"}, 1}, {{4, "four"}, 2}};
  t.junior_version = "abc";
  t.finish_reason = FinishReason::kStop;
  t.seed = std::numeric_limits<uint64_t>::max();
  t.sample_index = 2;
  t.sampling.temperature = 0.7f;
  t.sampling.stop_token_ids = {1};
  t.sampling.stop = {"</answer>"};
  t.tandem.selection_strategy = SelectionStrategy::kWord;
  t.tandem.boundary_token_ids = {4};
  t.routed_experts = {.layers = 2, .experts_per_token = 1, .ids = {0, 3, 255, 2, 1, 0, 7, 7}};
  return t;
}

TEST(FloatsTest, RoundTripIsExact) {
  const std::vector<float> values = {0.1f, -0.0f, std::numeric_limits<float>::infinity(), 1e-40f};
  const auto back = FloatsFromProto(Floats(values));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, values);
  EXPECT_TRUE(FloatsFromProto(Floats({}))->empty());
}

struct BadTensor {
  const char* what;
  std::function<void(types::v1::Tensor*)> damage;
  const char* path;
};

class BadTensorTest : public testing::TestWithParam<BadTensor> {};
TEST_P(BadTensorTest, IsRefusedWithThePath) {
  types::v1::Tensor tensor = Floats({1, 2, 3});
  GetParam().damage(&tensor);
  const auto result = FloatsFromProto(tensor);
  ASSERT_FALSE(result.ok()) << GetParam().what;
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(result.status()), GetParam().path) << result.status();
}
INSTANTIATE_TEST_SUITE_P(
    All, BadTensorTest,
    testing::Values(BadTensor{"no dtype", [](auto* t) { t->clear_dtype(); }, "dtype"},
                    BadTensor{"other dtype",
                              [](auto* t) { t->set_dtype(types::v1::DATA_TYPE_INT64); }, "dtype"},
                    BadTensor{"bytes missing", [](auto* t) { t->mutable_data()->pop_back(); },
                              "data"},
                    BadTensor{"one element more", [](auto* t) { t->set_shape(0, 4); }, "data"},
                    BadTensor{"negative extent", [](auto* t) { t->set_shape(0, -1); }, "shape[0]"},
                    BadTensor{"a claim of 2^62 elements",
                              [](auto* t) { t->set_shape(0, int64_t{1} << 62); }, "data"},
                    BadTensor{"overflow",
                              [](auto* t) {
                                t->set_shape(0, int64_t{1} << 40);
                                t->add_shape(int64_t{1} << 40);
                              },
                              "shape"},
                    BadTensor{"scalar", [](auto* t) { t->clear_shape(); }, "shape"},
                    BadTensor{"two dimensions", [](auto* t) { t->add_shape(1); }, "shape"}));

TEST(TrajectoryTest, RoundTripKeepsEverything) {
  types::v1::Trajectory proto;
  TrajectoryToProto(Example(), &proto);
  const auto back = TrajectoryFromProto(proto);
  ASSERT_TRUE(back.ok()) << back.status();
  types::v1::Trajectory again;
  TrajectoryToProto(*back, &again);
  EXPECT_EQ(again.SerializeAsString(), proto.SerializeAsString());
  EXPECT_EQ(back->tandem, Example().tandem);
  EXPECT_EQ(back->sampling, Example().sampling);
  EXPECT_EQ(back->senior_versions, Example().senior_versions);
  EXPECT_EQ(back->routed_experts, Example().routed_experts);
}

TEST(TrajectoryTest, IdsOfExpertsTakeAByteUnlessOneIsWider) {
  Trajectory wide = Example();
  wide.routed_experts.ids[1] = 256;
  for (const auto& [trajectory, dtype, bytes] :
       {std::tuple{Example(), types::v1::DATA_TYPE_UINT8, size_t{8}},
        std::tuple{wide, types::v1::DATA_TYPE_INT32, size_t{32}}}) {
    types::v1::Trajectory proto;
    TrajectoryToProto(trajectory, &proto);
    EXPECT_EQ(proto.routed_experts().dtype(), dtype);
    EXPECT_EQ(proto.routed_experts().data().size(), bytes);
    const auto back = TrajectoryFromProto(proto);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->routed_experts, trajectory.routed_experts);
  }
}

struct BadTrajectory {
  std::function<void(types::v1::Trajectory*)> damage;
  const char* path;
};

class BadTrajectoryTest : public testing::TestWithParam<BadTrajectory> {};
TEST_P(BadTrajectoryTest, FailsClosed) {
  types::v1::Trajectory proto;
  TrajectoryToProto(Example(), &proto);
  GetParam().damage(&proto);
  const auto result = TrajectoryFromProto(proto);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(result.status()), GetParam().path) << result.status();
}
INSTANTIATE_TEST_SUITE_P(
    All, BadTrajectoryTest,
    testing::Values(
        BadTrajectory{[](auto* t) { t->clear_prompt_token_ids(); }, "prompt_token_ids"},
        BadTrajectory{[](auto* t) { t->clear_response_token_ids(); }, "response_token_ids"},
        BadTrajectory{[](auto* t) { t->clear_authorship_mask(); }, "authorship_mask"},
        BadTrajectory{[](auto* t) { t->set_authorship_mask("\1"); }, "authorship_mask"},
        BadTrajectory{[](auto* t) { t->set_authorship_mask("\1\3\1"); }, "authorship_mask[1]"},
        BadTrajectory{[](auto* t) { t->clear_author_logprobs(); }, "author_logprobs"},
        BadTrajectory{[](auto* t) { *t->mutable_author_logprobs() = Floats({1}); },
                      "author_logprobs"},
        BadTrajectory{[](auto* t) { t->mutable_author_logprobs()->clear_dtype(); },
                      "author_logprobs.dtype"},
        BadTrajectory{[](auto* t) { *t->mutable_other_logprobs() = Floats({1}); },
                      "other_logprobs"},
        BadTrajectory{[](auto* t) { *t->mutable_log_keep_mass() = Floats({}); }, "log_keep_mass"},
        BadTrajectory{[](auto* t) { t->mutable_routed_experts()->clear_dtype(); },
                      "routed_experts.dtype"},
        BadTrajectory{[](auto* t) { t->mutable_routed_experts()->set_shape(0, 5); },
                      "routed_experts.shape"},
        BadTrajectory{[](auto* t) { t->mutable_routed_experts()->mutable_shape()->RemoveLast(); },
                      "routed_experts.shape"},
        BadTrajectory{[](auto* t) { t->mutable_routed_experts()->set_shape(1, 0); },
                      "routed_experts.shape"},
        BadTrajectory{[](auto* t) { t->mutable_routed_experts()->mutable_data()->pop_back(); },
                      "routed_experts.data"},
        BadTrajectory{[](auto* t) {
                        t->mutable_routed_experts()->set_dtype(types::v1::DATA_TYPE_INT32);
                        t->mutable_routed_experts()->set_data(std::string(32, '\xff'));
                      },
                      "routed_experts.data"},
        BadTrajectory{[](auto* t) { t->clear_senior_versions(); }, "senior_versions"},
        BadTrajectory{[](auto* t) { t->mutable_senior_versions(1)->set_count(5); },
                      "senior_versions"},
        BadTrajectory{[](auto* t) { t->mutable_senior_versions(0)->set_count(-1); },
                      "senior_versions[0].count"},
        BadTrajectory{[](auto* t) { t->clear_finish_reason(); }, "finish_reason"},
        BadTrajectory{[](auto* t) { t->clear_sampling(); }, "sampling"},
        BadTrajectory{[](auto* t) { t->mutable_sampling()->clear_max_tokens(); },
                      "sampling.max_tokens"},
        BadTrajectory{[](auto* t) { t->clear_tandem(); }, "tandem"},
        BadTrajectory{[](auto* t) {
                        t->mutable_tandem()->set_selection_strategy(
                            static_cast<types::v1::SelectionStrategy>(77));
                      },
                      "tandem.selection_strategy"}));

TEST(TandemConfigTest, OpenFieldsTakeTheDefaults) {
  TandemConfig defaults;
  defaults.prob_senior = 0.25;
  defaults.chunk_size = 9;
  types::v1::TandemConfig proto;
  EXPECT_EQ(*TandemConfigFromProto(proto, defaults), defaults);
  proto.set_enabled(false);
  proto.set_prob_senior(0);
  const auto config = TandemConfigFromProto(proto, defaults);
  EXPECT_FALSE(config->enabled);
  EXPECT_EQ(config->prob_senior, 0);
  EXPECT_EQ(config->chunk_size, 9);
}

TEST(SamplingParamsTest, EveryFieldIsCarriedAsItIs) {
  types::v1::SamplingParams proto;
  EXPECT_EQ(FieldPath(SamplingParamsFromProto(proto).status()), "max_tokens");
  proto.set_max_tokens(7);
  proto.set_temperature(0.7);
  proto.set_top_k(5);
  proto.set_top_p(0.9);
  proto.set_min_p(0.1);
  proto.add_stop_token_ids(3);
  proto.add_stop("\n\nQ:");
  const auto params = SamplingParamsFromProto(proto);
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->max_tokens, 7);
  EXPECT_EQ(params->temperature, 0.7);
  EXPECT_EQ(params->top_k, 5);
  EXPECT_EQ(params->top_p, 0.9);
  EXPECT_EQ(params->min_p, 0.1);
  EXPECT_THAT(params->stop_token_ids, testing::ElementsAre(3));
  EXPECT_THAT(params->stop, testing::ElementsAre("\n\nQ:"));
}

WeightManifest Manifest() {
  WeightManifest manifest;
  manifest.version = 3;
  manifest.tensors = {{"a", DType::kFloat32, {2, 3}}, {"b", DType::kBFloat16, {4}}};
  manifest.total_bytes = 32;
  manifest.digest = std::string(32, 'a');
  manifest.num_token_ids = 7;
  manifest.sent_digest = std::string(32, 'c');
  return manifest;
}

WeightManifest ManifestWithSpeculator() {
  WeightManifest manifest = Manifest();
  manifest.tensors.push_back({"speculator.h", DType::kFloat32, {2}});
  manifest.total_bytes += 8;
  manifest.components = {
      {.name = kSpeculatorComponent, .config = "{}", .digest = std::string(32, 'b')}};
  return manifest;
}

TEST(WeightManifestTest, RoundTrip) {
  for (const WeightManifest& manifest : {Manifest(), ManifestWithSpeculator()}) {
    weights::v1::WeightManifest proto;
    WeightManifestToProto(manifest, &proto);
    EXPECT_EQ(*WeightManifestFromProto(proto), manifest);
    EXPECT_EQ(manifest.Without(kSpeculatorComponent), Manifest());
  }
}

TEST(WeightManifestTest, AComponentThatIsNotInTheTableIsRefusedByName) {
  for (const char* name : {"adapter", "model", ""}) {
    weights::v1::WeightManifest proto;
    WeightManifestToProto(ManifestWithSpeculator(), &proto);
    proto.mutable_components(0)->set_name(name);
    const absl::Status status = WeightManifestFromProto(proto).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(FieldPath(status), "components[0].name") << name;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(absl::StrCat("\"", name, "\"")));
  }
}

TEST(WeightManifestTest, DamageIsNamed) {
  const auto path_after = [](const std::function<void(weights::v1::WeightManifest*)>& damage) {
    weights::v1::WeightManifest proto;
    WeightManifestToProto(ManifestWithSpeculator(), &proto);
    damage(&proto);
    return FieldPath(WeightManifestFromProto(proto).status()).value_or("");
  };
  EXPECT_EQ(path_after([](auto* m) { m->clear_tensors(); }), "total_bytes");
  EXPECT_EQ(path_after([](auto* m) { m->set_sent_digest("c"); }), "sent_digest");
  EXPECT_EQ(path_after([](auto* m) { m->mutable_tensors(1)->set_name("a"); }), "tensors[1].name");
  EXPECT_EQ(path_after([](auto* m) { m->mutable_tensors(1)->clear_dtype(); }), "tensors[1].dtype");
  EXPECT_EQ(path_after([](auto* m) { m->mutable_tensors(0)->set_shape(1, -3); }),
            "tensors[0].shape[1]");
  EXPECT_EQ(path_after([](auto* m) { m->mutable_tensors(0)->set_shape(0, int64_t{1} << 62); }),
            "tensors[0].shape");
  EXPECT_EQ(path_after([](auto* m) { m->set_total_bytes(31); }), "total_bytes");
  EXPECT_EQ(path_after([](auto* m) { m->set_chunk_bytes(0); }), "chunk_bytes");
  EXPECT_EQ(path_after([](auto* m) { m->set_digest("xyz"); }), "digest");
  EXPECT_EQ(path_after([](auto* m) { m->mutable_components(0)->clear_digest(); }),
            "components[0].digest");
  EXPECT_EQ(path_after([](auto* m) { *m->add_components() = m->components(0); }),
            "components[1].name");
}

}  // namespace
}  // namespace tandem::rpc
