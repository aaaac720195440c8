#include "common/ranks/monitor/heartbeats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

constexpr absl::Duration kSilence = absl::Seconds(16);
constexpr SteadyTime kStart = SteadyTime();

// Rank 1 of three, which reads the records once a second of the test's own time.
class HeartbeatsTest : public testing::Test {
 protected:
  static constexpr int kOwn = 1;

  // Lets `seconds` pass, in each of which the ranks in `beats` beat and this rank reads.
  void Live(int seconds, const std::vector<int>& beats) {
    for (int i = 0; i < seconds; ++i) {
      for (const int rank : beats)
        records_[static_cast<size_t>(rank)] = BeatRecord(++count_, progress_);
      Read(absl::Seconds(1));
    }
  }
  void Read(absl::Duration after) {
    now_ += after;
    heartbeats_.Update(records_, now_);
  }
  // Lets time pass until a failure is found; returns the seconds, or -1 after a hundred.
  int SecondsUntilFailure(const std::vector<int>& beats) {
    for (int seconds = 1; seconds <= 100; ++seconds) {
      Live(1, beats);
      if (!heartbeats_.FindFailure().empty()) return seconds;
    }
    return -1;
  }

  SteadyTime now_ = kStart;
  int64_t count_ = 0, progress_ = 0;
  std::vector<std::string> records_ = {"", "", ""};
  Heartbeats heartbeats_{kOwn, 3, kSilence, kStart};
};

TEST_F(HeartbeatsTest, ALostRankIsFoundAfterItsSilenceAndNamed) {
  for (const int lost : {0, 2}) {
    Live(30, {0, 1, 2});
    EXPECT_EQ(heartbeats_.FindFailure(), "");
    EXPECT_EQ(SecondsUntilFailure({1, 2 - lost}), 17) << lost;
    EXPECT_THAT(heartbeats_.FindFailure(), StartsWith(absl::StrCat("rank ", lost, " (pid ")));
    EXPECT_THAT(heartbeats_.FindFailure(), EndsWith(") has been silent for 16s"));
  }
}

TEST_F(HeartbeatsTest, ARankThatNeverBeatsIsLost) {
  EXPECT_EQ(SecondsUntilFailure({0, 1}), 17);
  EXPECT_EQ(heartbeats_.FindFailure(), "rank 2 has been silent for 16s");
}

TEST_F(HeartbeatsTest, ARankThatLeavesIsNotMissed) {
  Live(5, {0, 1, 2});
  records_[2] = LeftRecord();
  EXPECT_EQ(SecondsUntilFailure({0, 1}), -1);
  EXPECT_FALSE(heartbeats_.host_has_left());
  records_[0] = LeftRecord();
  Live(1, {1});
  EXPECT_TRUE(heartbeats_.host_has_left());
}

TEST_F(HeartbeatsTest, AReportedFailureIsThatOfAllRanks) {
  Live(5, {0, 1, 2});
  records_[2] = FailedRecord("rank 2: out of memory");
  Live(1, {0, 1});
  EXPECT_EQ(heartbeats_.FindFailure(), "rank 2: out of memory");
  // A report comes before the silence of another rank.
  Live(40, {1});
  EXPECT_EQ(heartbeats_.FindFailure(), "rank 2: out of memory");
}

TEST_F(HeartbeatsTest, ItsOwnRecordIsNoFailure) {
  records_[kOwn] = FailedRecord("rank 1: its own");
  Live(40, {0, 2});
  EXPECT_EQ(heartbeats_.FindFailure(), "");
}

// A machine that is moved to another host, or suspended, stands still with all its ranks.
TEST_F(HeartbeatsTest, RanksThatStandStillTogetherLoseNone) {
  Live(5, {0, 1, 2});
  Read(absl::Hours(3));
  EXPECT_EQ(heartbeats_.FindFailure(), "");
  Live(5, {1});  // this rank runs again before the others
  EXPECT_EQ(heartbeats_.FindFailure(), "");
  Live(40, {0, 1, 2});
  EXPECT_EQ(heartbeats_.FindFailure(), "");
  EXPECT_EQ(SecondsUntilFailure({0, 1}), 17);
}

// A standstill is more than half of the silence between two readings; shorter ones do not count.
TEST_F(HeartbeatsTest, AShortPauseIsNoStandstill) {
  Live(5, {0, 1, 2});
  for (int i = 0; i < 3; ++i) {
    records_[0] = BeatRecord(++count_, progress_);
    Read(kSilence / 2);
  }
  EXPECT_THAT(heartbeats_.FindFailure(), StartsWith("rank 2 "));
}

TEST_F(HeartbeatsTest, OthersHaveConcludedWhenTheyHaveSpokenOrFallenSilent) {
  Live(5, {0, 1, 2});
  EXPECT_FALSE(heartbeats_.OthersHaveConcluded());
  records_[0] = FailedRecord("x");
  Live(1, {1, 2});
  EXPECT_FALSE(heartbeats_.OthersHaveConcluded());
  records_[2] = LeftRecord();
  Live(1, {1});
  EXPECT_TRUE(heartbeats_.OthersHaveConcluded());
}

TEST_F(HeartbeatsTest, ADeadRankIsNotWaitedForAtTheEnd) {
  Live(5, {0, 1, 2});
  records_[0] = LeftRecord();
  Live(7, {1});
  EXPECT_FALSE(heartbeats_.OthersHaveConcluded());
  Live(1, {1});
  EXPECT_TRUE(heartbeats_.OthersHaveConcluded());
}

TEST_F(HeartbeatsTest, ProgressOfAnotherRankShowsAndItsBeatsAloneDoNot) {
  Live(3, {0, 1, 2});
  const int64_t before = heartbeats_.progress_of_others();
  Live(3, {0, 1, 2});
  EXPECT_EQ(heartbeats_.progress_of_others(), before);
  ++progress_;
  Live(1, {kOwn});
  EXPECT_EQ(heartbeats_.progress_of_others(), before);
  Live(1, {2});
  EXPECT_NE(heartbeats_.progress_of_others(), before);
}

TEST(StoreSilenceTest, AStoreThatMissesFourQuartersIsSilent) {
  StoreSilence silence;
  EXPECT_FALSE(silence.MissedAll(kStart));
  for (int quarter = 1; quarter < 4; ++quarter) EXPECT_FALSE(silence.MissedAll(kStart));
  EXPECT_TRUE(silence.MissedAll(kStart));
}

TEST(StoreSilenceTest, AnAnswerStartsTheCountAgain) {
  StoreSilence silence;
  SteadyTime answer = kStart;
  for (int round = 0; round < 10; ++round) {
    answer += absl::Seconds(1);
    for (int quarter = 0; quarter < 4; ++quarter) EXPECT_FALSE(silence.MissedAll(answer));
  }
}

}  // namespace
}  // namespace tandem::ranks
