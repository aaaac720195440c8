// The weights of a speculator in an update.
#include "common/speculator/speculator_update.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "common/base/errors/error.h"
#include "common/speculator/testing/cases.h"
#include "common/weights/weights_digest.h"

namespace tandem::speculator {
namespace {

class SpeculatorUpdateTest : public testing::TestWithParam<Case> {};

at::Tensor DraftsOf(const Speculator& speculator) {
  const at::Tensor hidden = at::arange(4 * kHidden, at::kFloat).view({4, kHidden}).sin();
  return speculator.Draft(hidden, at::tensor({3, 1, 4, 9}, at::kLong), kSteps).value();
}

TEST_P(SpeculatorUpdateTest, NewWeightsDraftAsTheSendersDo) {
  const SpeculatorOptions options = {.num_token_ids = kVocabulary - 1};
  const auto old = TinySpeculator(GetParam().config, options, /*seed=*/1);
  const auto sender = TinySpeculator(GetParam().config, options, /*seed=*/5);
  const at::Tensor before = DraftsOf(*old), sent = DraftsOf(*sender);
  ASSERT_FALSE(at::equal(before, sent));
  const auto prepared = PreparedSpeculator::Make(*old).value();
  for (const auto& [name, value] : WeightsToSend(*sender)) {
    ASSERT_TRUE(prepared->Add(name, value).ok()) << name;
  }
  EXPECT_TRUE(at::equal(DraftsOf(*old), before)) << "nothing changes before the swap";
  prepared->SwapWith(*old);
  EXPECT_TRUE(at::equal(DraftsOf(*old), sent));
  EXPECT_EQ(ManifestOf(*old), ManifestOf(*sender));
}

TEST_P(SpeculatorUpdateTest, PackedHeadsDraftAsRoundedOnesDo) {
  SpeculatorOptions options = {.num_token_ids = kVocabulary - 1, .packs_heads = true};
  const auto packed = TinySpeculator(GetParam().config, options, /*seed=*/1);
  options.packs_heads = false;
  const auto dense = TinySpeculator(GetParam().config, options, /*seed=*/1);
  const auto sender = TinySpeculator(GetParam().config, options, /*seed=*/5);
  const auto prepared = PreparedSpeculator::Make(*packed).value();
  for (const auto& [name, value] : WeightsToSend(*sender)) {
    ASSERT_TRUE(prepared->Add(name, value).ok()) << name;
  }
  RoundHeads(*dense);
  RoundHeads(*sender);
  EXPECT_TRUE(at::equal(DraftsOf(*packed), DraftsOf(*dense)));
  prepared->SwapWith(*packed);
  EXPECT_TRUE(at::equal(DraftsOf(*packed), DraftsOf(*sender)));
}

TEST_P(SpeculatorUpdateTest, AReceiverExpectsWhatASenderSends) {
  auto speculator = TinySpeculator(GetParam().config);
  speculator->SetLoadedDigest("as loaded");
  const ReceivedComponent received = ReceivedBy(*speculator);
  const ComponentManifest manifest = ManifestOf(*speculator);
  EXPECT_EQ(received.name, manifest.name);
  EXPECT_EQ(received.config, manifest.config);
  EXPECT_EQ(received.initial, (WeightsVersion{.version = 0, .digest = "as loaded"}));
  const NamedTensors sent = WeightsToSend(*speculator);
  EXPECT_EQ(WeightsDigest(sent), manifest.digest);
  ASSERT_EQ(received.parameters.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(received.parameters[i].name, sent[i].first);
    EXPECT_EQ(received.parameters[i].shape, sent[i].second.sizes().vec());
    EXPECT_EQ(ComponentOf(received.parameters[i]), manifest.name);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SpeculatorUpdateTest, testing::ValuesIn(Cases()), NameOf);

TEST(PreparedSpeculatorTest, WhatDoesNotFitIsRefusedByName) {
  const auto prepared = PreparedSpeculator::Make(*TinySpeculator(MlpJson())).value();
  EXPECT_EQ(FieldPath(prepared->Add("speculator.head.9.weight", at::zeros({1}))),
            "speculator.head.9.weight");
  EXPECT_EQ(FieldPath(prepared->Add("head.0.weight", at::zeros({kVocabulary, kState}))),
            "head.0.weight");
  EXPECT_EQ(FieldPath(prepared->Add("speculator.head.0.weight", at::zeros({kState, kVocabulary}))),
            "speculator.head.0.weight");
}

TEST(ManifestOfTest, AnotherKindOrSettingIsAnotherConfig) {
  const std::string config = ManifestOf(*TinySpeculator(MlpJson())).config;
  EXPECT_NE(ManifestOf(*TinySpeculator(MlpJson({{"tie_weights", true}}))).config, config);
  EXPECT_NE(ManifestOf(*TinySpeculator(MlpJson({{"scale_input", true}}))).config, config);
  EXPECT_NE(ManifestOf(*TinySpeculator(ArcticJson())).config, config);
  // Keys that say nothing of the computation count for nothing.
  EXPECT_EQ(ManifestOf(*TinySpeculator(MlpJson({{"_name_or_path", "here"}}))).config, config);
}

}  // namespace
}  // namespace tandem::speculator
