#include "services/rollout/engine/drafts/drafter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "services/rollout/engine/drafts/ngram_drafter.h"

namespace tandem::rollout {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> Propose(const std::vector<int32_t>& tokens, int64_t most, int64_t shortest = 1,
                             int64_t longest = 3) {
  std::vector<int32_t> drafts;
  NgramDrafter(shortest, longest).Propose(tokens, most, drafts);
  return drafts;
}

TEST(NgramDrafterTest, ProposesWhatFollowedTheLastTokensBefore) {
  EXPECT_THAT(Propose({1, 2, 3, 4, 5, 9, 2, 3}, 2), ElementsAre(4, 5));
}

TEST(NgramDrafterTest, TheLongestSuffixDecidesAndThenTheLastOccurrence) {
  EXPECT_THAT(Propose({1, 2, 7, 5, 2, 8, 1, 2}, 1), ElementsAre(7)) << "1 2 is longer than 2";
  EXPECT_THAT(Propose({5, 2, 7, 6, 2, 8, 1, 2}, 1), ElementsAre(8)) << "the second 2 is later";
  EXPECT_THAT(Propose({1, 2, 7, 5, 2, 8, 1, 2}, 1, 1, 1), ElementsAre(8)) << "one token counts";
}

TEST(NgramDrafterTest, NothingIsProposedForASuffixThatIsNewOrTooShort) {
  EXPECT_THAT(Propose({1, 2, 3}, 4), IsEmpty());
  EXPECT_THAT(Propose({1, 2, 3, 2}, 4, 2), IsEmpty());
  EXPECT_THAT(Propose({1}, 4), IsEmpty());
}

TEST(NgramDrafterTest, APeriodIsContinued) {
  EXPECT_THAT(Propose({4, 6, 6}, 3), ElementsAre(6, 6, 6));
  EXPECT_THAT(Propose({4, 5, 6, 5, 6}, 5), ElementsAre(5, 6, 5, 6, 5));
}

// The rule itself, in time that grows with the square of the length.
std::vector<int32_t> Slow(std::span<const int32_t> tokens, int64_t most, int64_t shortest,
                          int64_t longest) {
  const int64_t length = std::ssize(tokens);
  for (int64_t n = std::min(longest, length - 1); n >= shortest; --n) {
    for (int64_t end = length - 1; end >= n; --end) {
      if (!std::ranges::equal(tokens.subspan(end - n, n), tokens.last(n))) continue;
      std::vector<int32_t> text(tokens.begin(), tokens.end());
      for (int64_t i = 0; i < most; ++i) text.push_back(text[end + i]);
      return {text.begin() + length, text.end()};
    }
  }
  return {};
}

TEST(NgramDrafterTest, AGrowingSequenceGetsTheDraftsOfTheRule) {
  std::mt19937 random(3);
  for (int round = 0; round < 40; ++round) {
    const int64_t shortest = 1 + static_cast<int64_t>(random() % 3);
    const int64_t longest = shortest + static_cast<int64_t>(random() % 3);
    const uint32_t vocabulary = 2 + random() % 5;
    NgramDrafter drafter(shortest, longest);
    std::vector<int32_t> tokens;
    int64_t found = 0;
    while (tokens.size() < 120) {
      for (uint32_t more = 1 + random() % 4; more > 0; --more) {
        tokens.push_back(static_cast<int32_t>(random() % vocabulary));
      }
      std::vector<int32_t> drafts;
      drafter.Propose(tokens, 4, drafts);
      ASSERT_EQ(drafts, Slow(tokens, 4, shortest, longest));
      found += std::ssize(drafts);
    }
    EXPECT_GT(found, 0);
  }
}

TEST(DraftLengthTest, FollowsWhatWasAccepted) {
  DraftLength length(4);
  EXPECT_EQ(length.Next(), 4);
  length.OnPass(4, 1);
  EXPECT_EQ(length.Next(), 2);
  length.OnPass(2, 2);
  EXPECT_EQ(length.Next(), 3);
  length.OnPass(1, 1);
  EXPECT_EQ(length.Next(), 3) << "fewer than it allowed were proposed";
  length.OnPass(3, 3);
  length.OnPass(4, 4);
  EXPECT_EQ(length.Next(), 4);
}

// Spends `passes` passes without drafts.
void WaitOut(int64_t passes, DraftLength& length) {
  for (int64_t pass = 0; pass < passes; ++pass) {
    EXPECT_EQ(length.Next(), 0);
    length.OnPass(0, 0);
  }
}

TEST(DraftLengthTest, PausesAfterMissesAndTriesOneAgain) {
  DraftLength length(4);
  for (int64_t miss = 0; miss < DraftLength::kMaxMisses; ++miss) {
    EXPECT_GT(length.Next(), 0);
    length.OnPass(length.Next(), 0);
  }
  WaitOut(DraftLength::kPausePasses, length);
  EXPECT_EQ(length.Next(), 1);
  length.OnPass(1, 1);
  length.OnPass(2, 0);
  EXPECT_EQ(length.Next(), 1) << "an accepted draft ends the row of misses";
}

TEST(DraftLengthTest, EveryPauseIsTwiceAsLongUntilADraftIsAccepted) {
  DraftLength length(4);
  const auto miss = [&] { length.OnPass(length.Next(), 0); };
  for (int64_t i = 0; i < DraftLength::kMaxMisses; ++i) miss();
  int64_t pause = DraftLength::kPausePasses;
  for (; pause < DraftLength::kMaxPausePasses; pause *= 2) {
    WaitOut(pause, length);
    miss();
  }
  WaitOut(DraftLength::kMaxPausePasses, length);
  miss();
  WaitOut(DraftLength::kMaxPausePasses, length);
  length.OnPass(1, 1);
  for (int64_t i = 0; i < DraftLength::kMaxMisses; ++i) miss();
  WaitOut(DraftLength::kPausePasses, length);
  EXPECT_EQ(length.Next(), 1);
}

}  // namespace
}  // namespace tandem::rollout
