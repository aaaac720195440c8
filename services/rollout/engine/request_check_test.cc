#include "services/rollout/engine/request_check.h"

#include <gtest/gtest.h>

#include <cmath>

#include "common/base/error.h"

namespace tandem::rollout {
namespace {

constexpr RequestLimits kLimits = {
    .num_token_ids = 50, .max_model_len = 10, .max_samples = 4, .has_junior = true};

TEST(CheckScoreTest, ErrorsNameTheField) {
  ScoreRequest request;
  RequestLimits limits = kLimits;
  const auto path = [&] { return FieldPath(CheckScore(request, limits)).value_or(""); };
  EXPECT_EQ(path(), "sequences");
  request.sequences = {{{1}, 1}};
  EXPECT_EQ(path(), "sequences[0].token_ids");
  request.sequences = {{{1, 2}, 2}};
  EXPECT_EQ(path(), "sequences[0].first_scored_token");
  request.sequences = {{{1, 2}, 0}};
  EXPECT_EQ(path(), "sequences[0].first_scored_token");
  request.sequences = {{{1, 2}, 1}, {{1, 50}, 1}};
  EXPECT_EQ(path(), "sequences[1].token_ids[1]");
  request.sequences = {{{1, 2}, 1}};
  EXPECT_EQ(path(), "");
  for (const double temperature : {0.0, -1.0, 1e-9, static_cast<double>(NAN)}) {
    request.temperature = temperature;
    EXPECT_EQ(path(), "temperature") << temperature;
  }
  request.temperature = 1.0;
  request.senior = false;
  EXPECT_EQ(path(), "senior");
  request.junior = true;
  EXPECT_EQ(path(), "");
  limits.has_junior = false;
  EXPECT_EQ(path(), "junior");
}

}  // namespace
}  // namespace tandem::rollout
