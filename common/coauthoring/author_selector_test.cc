#include "common/coauthoring/author_selector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>

#include "common/base/philox.h"
#include "common/coauthoring/authorship_mask.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;

constexpr Author S = Author::kSenior;
constexpr Author J = Author::kJunior;
constexpr uint64_t kSeed = 0x1234567890abcdef;
constexpr uint64_t kSample = 5;
constexpr int32_t kBoundary = 9;

std::shared_ptr<const TokenSet> Boundaries() {
  return std::make_shared<TokenSet>(std::vector<int32_t>{kBoundary});
}

std::vector<Author> Mask(const TandemConfig& config, const std::vector<int32_t>& tokens,
                         uint64_t seed = kSeed, uint64_t sample = kSample) {
  AuthorSelector selector(config, seed, sample, Boundaries());
  std::vector<Author> mask;
  for (const int32_t token : tokens) {
    mask.push_back(selector.NextAuthor());
    selector.OnToken(token);
  }
  return mask;
}

bool Coin(uint32_t t, double prob_senior) {
  return Uniform(kSeed, kSample, t, RandomPurpose::kAuthor) < prob_senior;
}

std::vector<int32_t> RandomTokens(int count) {
  std::mt19937 random(3);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 10);
  return tokens;
}

TEST(AuthorSelectorTest, BernoulliIsTheCoin) {
  const auto mask = Mask({.prob_senior = 0.3}, RandomTokens(200));
  for (uint32_t t = 0; t < 200; ++t) EXPECT_EQ(mask[t] == Author::kSenior, Coin(t, 0.3));
}

TEST(AuthorSelectorTest, ChunkStartsWithTheSenior) {
  const auto mask =
      Mask({.selection_strategy = SelectionStrategy::kChunk, .chunk_size = 3}, RandomTokens(8));
  EXPECT_THAT(mask, ElementsAre(S, S, S, J, J, J, S, S));
}

TEST(AuthorSelectorTest, AlternatingStartsWithTheSenior) {
  const auto mask = Mask({.selection_strategy = SelectionStrategy::kAlternating}, RandomTokens(4));
  EXPECT_THAT(mask, ElementsAre(S, J, S, J));
}

TEST(AuthorSelectorTest, SentenceTogglesAfterABoundary) {
  const auto mask = Mask({.selection_strategy = SelectionStrategy::kSentence},
                         {1, kBoundary, 2, 3, kBoundary, kBoundary, 4});
  EXPECT_THAT(mask, ElementsAre(S, S, J, J, J, S, J));
}

TEST(AuthorSelectorTest, WordDrawsAfterBoundariesAndGaps) {
  const TandemConfig config = {
      .selection_strategy = SelectionStrategy::kWord, .prob_senior = 0.5, .max_gap_tokens = 4};
  std::vector<int32_t> tokens(40, 1);
  for (const int at : {2, 3, 20}) tokens[at] = kBoundary;
  // A draw at 0; after the boundaries at 3, 4 and 21; every 4 tokens after the last draw.
  const std::vector<uint32_t> draws = {0, 3, 4, 8, 12, 16, 20, 21, 25, 29, 33, 37};
  const auto mask = Mask(config, tokens);
  bool senior = false;
  for (uint32_t t = 0; t < 40; ++t) {
    if (std::find(draws.begin(), draws.end(), t) != draws.end()) senior = Coin(t, 0.5);
    EXPECT_EQ(mask[t] == Author::kSenior, senior) << t;
  }
  EXPECT_GT(CountSwitches(mask), 0);
}

TEST(AuthorSelectorTest, DisabledIsAllSenior) {
  const TandemConfig config = {.enabled = false, .prob_senior = 0.0};
  EXPECT_EQ(Mask(config, RandomTokens(20)), std::vector<Author>(20, Author::kSenior));
}

TEST(AuthorSelectorTest, ProbabilityOneAndZeroAreSolo) {
  for (const auto strategy : {SelectionStrategy::kBernoulli, SelectionStrategy::kWord}) {
    const auto tokens = RandomTokens(100);
    EXPECT_EQ(Mask({.selection_strategy = strategy, .prob_senior = 1.0}, tokens),
              std::vector<Author>(100, Author::kSenior));
    EXPECT_EQ(Mask({.selection_strategy = strategy, .prob_senior = 0.0}, tokens),
              std::vector<Author>(100, Author::kJunior));
  }
}

TEST(AuthorSelectorTest, SamplesAndSeedsHaveTheirOwnCoins) {
  const auto tokens = RandomTokens(64);
  EXPECT_NE(Mask({}, tokens, 1, 0), Mask({}, tokens, 1, 1));
  EXPECT_NE(Mask({}, tokens, 1, 0), Mask({}, tokens, 2, 0));
  EXPECT_EQ(Mask({}, tokens, 1, 0), Mask({}, tokens, 1, 0));
}

TEST(AuthorSelectorTest, KnowsTheAuthorBehindTheNextTokenWhereNoTokenChangesIt) {
  std::map<SelectionStrategy, int> unknown;
  for (const auto strategy :
       {SelectionStrategy::kBernoulli, SelectionStrategy::kChunk, SelectionStrategy::kAlternating,
        SelectionStrategy::kSentence, SelectionStrategy::kWord, SelectionStrategy::kTurn}) {
    AuthorSelector selector({.selection_strategy = strategy, .chunk_size = 7, .max_gap_tokens = 5},
                            kSeed, kSample, Boundaries());
    for (const int32_t token : RandomTokens(300)) {
      std::optional<Author> behind[2];
      for (const int32_t next : {kBoundary, kBoundary - 1}) {
        AuthorSelector after = selector;
        after.OnToken(next);
        behind[next == kBoundary] = after.NextAuthor();
      }
      unknown[strategy] += behind[0] != behind[1];
      EXPECT_EQ(selector.AuthorAfterNext(), behind[0] == behind[1] ? behind[0] : std::nullopt);
      selector.OnToken(token);
    }
  }
  EXPECT_EQ(unknown[SelectionStrategy::kSentence], 300);
  EXPECT_GT(unknown[SelectionStrategy::kWord], 50);
  EXPECT_LT(unknown[SelectionStrategy::kWord], 200);
  EXPECT_EQ(unknown[SelectionStrategy::kBernoulli] + unknown[SelectionStrategy::kChunk] +
                unknown[SelectionStrategy::kAlternating] + unknown[SelectionStrategy::kTurn],
            0);
}

// Law: replaying a prefix gives the same state.
TEST(AuthorSelectorTest, ReplayedPrefixGoesOnIdentically) {
  const auto tokens = RandomTokens(60);
  for (const auto strategy :
       {SelectionStrategy::kBernoulli, SelectionStrategy::kChunk, SelectionStrategy::kAlternating,
        SelectionStrategy::kSentence, SelectionStrategy::kWord, SelectionStrategy::kTurn}) {
    const TandemConfig config = {
        .selection_strategy = strategy, .chunk_size = 7, .max_gap_tokens = 5};
    const auto whole = Mask(config, tokens);
    for (size_t cut = 0; cut < tokens.size(); ++cut) {
      AuthorSelector resumed(config, kSeed, kSample, Boundaries());
      for (size_t i = 0; i < cut; ++i) resumed.OnToken(tokens[i]);
      for (size_t t = cut; t < tokens.size(); ++t) {
        ASSERT_EQ(resumed.NextAuthor(), whole[t]);
        resumed.OnToken(tokens[t]);
      }
    }
  }
}

// A turn begins as a response does, but its coins have the numbers of its tokens in the response.
TEST(AuthorSelectorTest, ATurnBeginsBehindAnEnvironment) {
  const auto tokens = RandomTokens(90);
  // An environment's tokens: after an odd number of a chunk, several, one behind a boundary.
  const auto said = [&](size_t t) { return t == 11 || (t >= 23 && t < 27) || t == 61; };
  for (const auto strategy :
       {SelectionStrategy::kBernoulli, SelectionStrategy::kChunk, SelectionStrategy::kAlternating,
        SelectionStrategy::kSentence, SelectionStrategy::kWord, SelectionStrategy::kTurn}) {
    const TandemConfig config = {
        .selection_strategy = strategy, .prob_senior = 0.5, .chunk_size = 7, .max_gap_tokens = 5};
    AuthorSelector selector(config, kSeed, kSample, Boundaries());
    size_t begin = 0, drawn = 0;
    Author author = S;
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (said(t)) {
        selector.OnEnvironmentToken();
        begin = t + 1;
        continue;
      }
      const bool boundary = t > begin && tokens[t - 1] == kBoundary;
      const Author coin = Coin(static_cast<uint32_t>(t), 0.5) ? S : J;
      switch (strategy) {
        case SelectionStrategy::kBernoulli:
          author = coin;
          break;
        case SelectionStrategy::kChunk:
          author = (t - begin) / 7 % 2 == 0 ? S : J;
          break;
        case SelectionStrategy::kAlternating:
          author = (t - begin) % 2 == 0 ? S : J;
          break;
        case SelectionStrategy::kSentence:
          if (t == begin) author = S;
          if (boundary) author = author == S ? J : S;
          break;
        case SelectionStrategy::kWord:
          if (t == begin || boundary || t - drawn >= 5) {
            author = coin;
            drawn = t;
          }
          break;
        case SelectionStrategy::kTurn:
          author = t < 11 || (t > 26 && t < 61) ? S : J;
          break;
      }
      ASSERT_EQ(selector.NextAuthor(), author) << static_cast<int>(strategy) << " " << t;
      selector.OnToken(tokens[t]);
    }
    EXPECT_EQ(selector.size(), std::ssize(tokens));
  }
}

// The first turn is the senior's, also behind an environment that speaks first.
TEST(AuthorSelectorTest, WholeTurnsAlternate) {
  AuthorSelector selector({.selection_strategy = SelectionStrategy::kTurn}, kSeed, kSample,
                          Boundaries());
  selector.OnEnvironmentToken();
  selector.OnEnvironmentToken();
  for (const Author author : {S, J, S, J}) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(selector.NextAuthor(), author);
      selector.OnToken(kBoundary);
    }
    for (int i = 0; i < 2; ++i) selector.OnEnvironmentToken();
  }
}

TEST(TokenSetTest, HoldsItsIdsOnly) {
  const TokenSet set(std::vector<int32_t>{5, 2, 5});
  EXPECT_TRUE(set.contains(2));
  EXPECT_FALSE(set.contains(3));
  EXPECT_FALSE(set.contains(-1));
  EXPECT_FALSE(set.contains(1000));
  EXPECT_THAT(set.ids(), ElementsAre(2, 5));
}

}  // namespace
}  // namespace tandem
