#include "common/parallel/whole_parameters.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/base/errors/status_macros.h"
#include "common/loss/testing/metered_memory.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/rank_agreement.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/weights/weight_snapshot.h"
#include "common/weights/weights_digest.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

absl::StatusOr<std::string> DigestOf(Strategy& strategy) {
  TensorSums frozen;
  return ParametersDigest(strategy, frozen);
}

bool Every(const Parameter&) { return true; }

absl::Status Lost() { return absl::ResourceExhaustedError("the disk is full"); }

class WholeParametersTest : public ::testing::TestWithParam<int> {};  // stages of ZeRO

TEST_P(WholeParametersTest, TheDigestIsThatOfOneProcess) {
  for (const int size : {2, 4}) {
    ranks::RunConnected(size, [&](const Ranks& ranks) {
      const TemporaryFolder folder;
      WriteTinyModel(folder / "model", 3);
      ZeroStrategy zero(ZeroOfStage(GetParam()), ranks);
      Prepare(zero, folder / "model");
      EXPECT_EQ(DigestOf(zero).value(), zero.model().weights_digest());
      Step(zero, 3, 0);
      const std::string digest = DigestOf(zero).value();
      EXPECT_NE(digest, zero.model().weights_digest());
      const auto of_zero = [&] { return absl::StatusOr<std::string>(digest); };
      EXPECT_EQ(digest, ranks::FromRankZero<std::string>(*ranks, of_zero).value());
      const NamedTensors whole = WholeParameters(zero);
      if (ranks->rank() == 0) {
        EXPECT_EQ(digest, WeightsDigest(whole));
      }
    });
  }
}

// Before, in and after the visit; every rank gets it, and they are still in step.
TEST_P(WholeParametersTest, AnErrorOfRankZeroIsThatOfAll) {
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    ZeroStrategy zero(ZeroOfStage(GetParam()), ranks);
    Prepare(zero, folder / "model");
    const auto nothing = [](const std::string&, const at::Tensor&) { return absl::OkStatus(); };
    int visited = 0;
    const auto third = [&](const std::string&, const at::Tensor&) {
      return ++visited == 3 ? Lost() : absl::OkStatus();
    };
    EXPECT_EQ(UseWholeParameters(zero, Every, [&](TensorSource) { return Lost(); }), Lost());
    EXPECT_EQ(UseWholeParameters(zero, Every, [&](TensorSource source) { return source(third); }),
              Lost());
    EXPECT_EQ(visited, ranks->rank() == 0 ? 3 : 0);
    EXPECT_EQ(UseWholeParameters(zero, Every,
                                 [&](TensorSource source) {
                                   EXPECT_TRUE(source(nothing).ok());
                                   return Lost();
                                 }),
              Lost());
    EXPECT_EQ(UseWholeParameters(
                  zero, Every,
                  [&](TensorSource) -> absl::Status { throw std::runtime_error("unforeseen"); })
                  .code(),
              absl::StatusCode::kInternal);
    EXPECT_TRUE(
        UseWholeParameters(zero, Every, [](TensorSource) { return absl::OkStatus(); }).ok());
    EXPECT_EQ(DigestOf(zero).value(), zero.model().weights_digest());
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, WholeParametersTest, ::testing::Values(1, 2, 3));

TEST(WholeParametersSingleTest, OneProcessIsRankZero) {
  const TemporaryFolder folder;
  WriteTinyModel(folder / "model", 3);
  SingleStrategy single;
  Prepare(single, folder / "model");
  EXPECT_EQ(single.ranks().size(), 1);
  EXPECT_EQ(DigestOf(single).value(), single.model().weights_digest());
  EXPECT_EQ(UseWholeParameters(single, Every, [&](TensorSource) { return Lost(); }), Lost());
}

// A digest, a saved model and a snapshot, which are made tensor by tensor.
TEST(WholeParametersMemoryTest, RankZeroHoldsOneTensorBesideItsShardAndOthersNone) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const loss::MeteredMemory meter;
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3, {{"num_hidden_layers", 30}, {"hidden_size", 64}});
    ZeroStrategy zero(ZeroOfStage(3), ranks);
    Prepare(zero, folder / "model");
    int64_t largest = 0, all = 0;
    for (const Parameter& parameter : zero.model().DeclaredParameters()) {
      const int64_t bytes = 4 * parameter.spec.numel();
      largest = std::max(largest, bytes);
      all += bytes;
    }
    const int64_t start = meter->live();
    meter->Restart();
    EXPECT_TRUE(DigestOf(zero).ok());
    EXPECT_TRUE(UseWholeParameters(zero, Every, [&](TensorSource parameters) {
                  return zero.model().Save(folder / "saved", DType::kBFloat16, parameters);
                }).ok());
    EXPECT_TRUE(UseWholeParameters(zero, Every, [&](TensorSource parameters) {
                  return MakeWeightSnapshot(
                             ManifestOf(zero.model().SentSpecs(), {}, zero.model().num_token_ids()),
                             parameters)
                      .status();
                }).ok());
    // The tensor, the transport's copy of it, the tensor in another type.
    if (ranks->rank() == 0) {
      EXPECT_LE(meter->peak() - start, 3 * largest);
      EXPECT_GE(meter->peak() - start, largest);
    } else {
      EXPECT_LT(meter->peak() - start, largest);
    }
    EXPECT_LT(3 * largest, all / 4);
  });
}

}  // namespace
}  // namespace tandem::parallel
