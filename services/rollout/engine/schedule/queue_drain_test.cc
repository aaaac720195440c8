#include "services/rollout/engine/schedule/queue_drain.h"

#include <gtest/gtest.h>

namespace tandem::rollout {
namespace {

TEST(RetryAfterTest, IsTheTimeInWhichThePlacesBecomeFree) {
  EXPECT_EQ(RetryAfter(8, 40, absl::Seconds(10)), absl::Seconds(2));
  EXPECT_EQ(RetryAfter(1, 4, absl::Seconds(10)), absl::Milliseconds(2500));
}

TEST(RetryAfterTest, IsBounded) {
  EXPECT_EQ(RetryAfter(1, 1000, absl::Seconds(10)), absl::Milliseconds(100));
  EXPECT_EQ(RetryAfter(4096, 1, absl::Seconds(10)), absl::Seconds(30));
}

TEST(RetryAfterTest, WhileNothingHasEndedTheNextTakesAsLongAsWasMeasured) {
  EXPECT_EQ(RetryAfter(3, 0, absl::ZeroDuration()), absl::Milliseconds(100));
  EXPECT_EQ(RetryAfter(3, 0, absl::Seconds(2)), absl::Seconds(6));
  EXPECT_EQ(RetryAfter(3, 0.01, absl::Seconds(30)), absl::Seconds(30));
}

class QueueDrainTest : public ::testing::Test {
 protected:
  // Lets `sequences` end, evenly, in `seconds`.
  void Drain(int seconds, int sequences, int64_t waiting) {
    for (int second = 0; second < seconds; ++second) {
      now_ += absl::Seconds(1);
      ended_ += sequences / seconds;
      drain_.Observe(now_, waiting, ended_);
    }
  }
  double RetrySeconds(int64_t places) const {
    return absl::ToDoubleSeconds(drain_.RetryAfter(now_, places));
  }

  QueueDrain drain_;
  SteadyTime now_ = SteadyTime();
  int64_t ended_ = 0;
};

TEST_F(QueueDrainTest, FollowsTheRate) {
  drain_.Observe(now_, 50, 0);
  Drain(20, 100, 50);  // 5 a second
  EXPECT_NEAR(RetrySeconds(10), 2, 0.1);
  Drain(150, 150, 50);  // 1 a second
  EXPECT_NEAR(RetrySeconds(10), 10, 0.5);
}

TEST_F(QueueDrainTest, TimeWithoutWaitingSequencesDoesNotCount) {
  drain_.Observe(now_, 50, 0);
  Drain(20, 100, 50);
  drain_.Observe(now_, 0, ended_);
  now_ += absl::Hours(1);
  drain_.Observe(now_, 50, ended_);
  EXPECT_NEAR(RetrySeconds(10), 2, 0.1);
}

TEST_F(QueueDrainTest, AnEngineThatStandsStillHasLongerHints) {
  drain_.Observe(now_, 50, 0);
  Drain(20, 100, 50);
  now_ += absl::Seconds(30);  // not observed, as while the engine is paused
  EXPECT_GT(RetrySeconds(10), 4);
  now_ += absl::Hours(1);
  EXPECT_EQ(RetrySeconds(1), 30);
}

}  // namespace
}  // namespace tandem::rollout
