#include "common/coauthoring/authorship_mask.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "common/coauthoring/testing/authors.h"

namespace tandem {
namespace {

constexpr Author S = Author::kSenior;
constexpr Author J = Author::kJunior;

TEST(AuthorshipMaskTest, SentencesEndAtBoundariesAndAtTheEnd) {
  EXPECT_EQ(CountSentences({}), 0);
  EXPECT_EQ(CountSentences(std::array{false, false}), 1);
  EXPECT_EQ(CountSentences(std::array{false, true}), 1);
  EXPECT_EQ(CountSentences(std::array{true, false, true, false}), 3);
}

TEST(AuthorshipStatsTest, WeighsTokensNotSequences) {
  AuthorshipStats stats;
  stats.Add(std::array{S, S, J, S}, std::array{false, true, false, false});
  stats.Add(std::array{J, J}, std::array{false, false});
  EXPECT_EQ(stats.response_tokens(), 6);
  EXPECT_DOUBLE_EQ(stats.senior_token_fraction(), 0.5);
  EXPECT_DOUBLE_EQ(stats.junior_token_fraction(), 0.5);
  EXPECT_DOUBLE_EQ(stats.switches_per_seq(), 1.0);
  EXPECT_DOUBLE_EQ(stats.tokens_per_sent(), 2.0);
}

TEST(AuthorshipStatsTest, AnEnvironmentDividesAResponseAndCountsNowhere) {
  AuthorshipStats stats;
  // Sentences end at 0, 4 and 7, and with the turns at 2 and 6; a boundary of the environment's
  // ends none.
  stats.Add(Authors("SJJESSJEJ"),
            std::array{true, false, false, true, true, false, false, true, false});
  EXPECT_EQ(stats.response_tokens(), 7);
  EXPECT_DOUBLE_EQ(stats.senior_token_fraction(), 3.0 / 7);
  EXPECT_DOUBLE_EQ(stats.junior_token_fraction(), 4.0 / 7);
  EXPECT_DOUBLE_EQ(stats.switches_per_seq(), 2.0);
  EXPECT_DOUBLE_EQ(stats.tokens_per_sent(), 7.0 / 5);
  EXPECT_EQ(CountSwitches(Authors("SEJ")), 0);
}

TEST(AuthorshipStatsTest, AnEmptyBatchHasNoFractions) {
  const AuthorshipStats stats;
  EXPECT_EQ(stats.senior_token_fraction(), 0.0);
  EXPECT_EQ(stats.tokens_per_sent(), 0.0);
}

}  // namespace
}  // namespace tandem
