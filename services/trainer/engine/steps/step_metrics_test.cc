#include "services/trainer/engine/steps/step_metrics.h"

#include <gtest/gtest.h>

#include <vector>

#include "common/loss/testing/reduce_by_hand.h"

namespace tandem::trainer {
namespace {

TEST(StepMetricsTest, JuniorKlOfRanksIsThatOfTheBatch) {
  std::vector<TeacherKlSums> ranks = {{.rows = 3, .kl = 1.5, .loss = 0.25},
                                      {},  // saw no row
                                      {.rows = 1, .kl = -0.5, .loss = 0.5}};
  loss::ReduceByHand(ranks);
  for (const TeacherKlSums& sums : ranks) {
    EXPECT_EQ(sums.rows, 4);
    EXPECT_EQ(sums.kl, 1.0);
    EXPECT_EQ(sums.loss, 0.75);
  }
}

}  // namespace
}  // namespace tandem::trainer
