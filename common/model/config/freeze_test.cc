#include "common/model/config/freeze.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

const std::vector<ParameterSpec> kSpecs = {{.name = "model.embed_tokens.weight", .shape = {3, 2}},
                                           {.name = "model.layers.0.norm.weight", .shape = {2}},
                                           {.name = "model.layers.10.norm.weight", .shape = {2}}};

TEST(FreezeTest, PatternsMatchWholeNamesAndDots) {
  using testing::ElementsAre;
  EXPECT_THAT(TrainableParameters(kSpecs, {}).value(), ElementsAre(true, true, true));
  EXPECT_THAT(TrainableParameters(kSpecs, {"*norm*"}).value(), ElementsAre(true, false, false));
  EXPECT_THAT(TrainableParameters(kSpecs, {"model.layers.1[0-9].*"}).value(),
              ElementsAre(true, true, false));
  EXPECT_EQ(FieldPath(TrainableParameters(kSpecs, {"layers.0"}).status()), "freeze[0]");
}

TEST(FreezeTest, APatternWithoutEffectIsNamed) {
  const absl::Status status = TrainableParameters(kSpecs, {"*embed*", "*lm_head*"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "freeze[1]");
}

TEST(FreezeTest, SomethingMustBeLeftToTrain) {
  EXPECT_EQ(FieldPath(TrainableParameters(kSpecs, {"*"}).status()), "freeze");
}

}  // namespace
}  // namespace tandem
