#include "services/rollout/engine/blocks/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/model/passes/layer_cache.h"
#include "services/rollout/engine/blocks/block_table.h"

namespace tandem::rollout {
namespace {

const std::vector<int32_t> kTokens = {1, 2, 3}, kOther = {1, 2, 4};

TEST(BlockPoolTest, EveryBlockIsGivenOutOnce) {
  BlockPool pool({.first = 5, .count = 2});
  EXPECT_EQ(pool.Allocate(), 5);
  EXPECT_EQ(pool.Allocate(), 6);
  EXPECT_EQ(pool.Allocate(), std::nullopt);
  EXPECT_EQ(pool.num_held(), 2);
  pool.Release(6);
  EXPECT_EQ(pool.num_idle(), 1);
  EXPECT_EQ(pool.Allocate(), 6);
}

TEST(BlockPoolTest, ContentsAreFoundAfterTheirPrefixAlone) {
  BlockPool pool({.count = 4});
  const int32_t first = *pool.Allocate(), second = *pool.Allocate();
  const PrefixId prefix = pool.Remember(first, kNoPrefix, kTokens);
  pool.Remember(second, prefix, kTokens);
  EXPECT_EQ(pool.Find(kNoPrefix, kOther), std::nullopt);
  const auto found = pool.Find(kNoPrefix, kTokens);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->block, first);
  EXPECT_EQ(found->prefix, prefix);
  EXPECT_EQ(pool.Find(found->prefix, kTokens)->block, second);
}

TEST(BlockTableTest, BlocksOfOneImageAreNotThoseOfAnother) {
  BlockPool pool({.count = 4});
  const std::vector<int32_t> tokens(2 * kKvBlockTokens, 9);
  // The image lies in both blocks.
  const auto image = [](const char* identity) {
    return std::vector<ImageTokens>{{.begin = 1, .end = kKvBlockTokens + 1, .identity = identity}};
  };
  BlockTable table;
  table.Grow(pool);
  table.Grow(pool);
  table.Remember(pool, tokens, image("a"));
  const auto known = [&](const std::vector<ImageTokens>& images) {
    BlockTable other;
    const int64_t tokens_known = other.TakeKnown(pool, tokens, images);
    other.Release(pool);
    return tokens_known;
  };
  EXPECT_EQ(known(image("a")), 2 * kKvBlockTokens);
  EXPECT_EQ(known(image("b")), 0);
  EXPECT_EQ(known({}), 0);
  // An image that ends in the first block has no part in the second.
  std::vector<ImageTokens> shorter = image("a");
  shorter[0].end = kKvBlockTokens;
  EXPECT_EQ(known(shorter), kKvBlockTokens);
}

TEST(BlockPoolTest, TheLongestContentsAreFoundAmongOthers) {
  BlockPool pool({.count = 2000});
  std::mt19937 random(5);
  std::vector<std::pair<PrefixId, std::vector<int32_t>>> known;
  const auto draw = [&](size_t most) {
    std::vector<int32_t> tokens(random() % most);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 3);
    return tokens;
  };
  for (int i = 0; i < 1000; ++i) {
    const PrefixId before = kNoPrefix + random() % 2;
    std::vector<int32_t> tokens = draw(7);
    if (tokens.empty()) continue;
    pool.Remember(*pool.Allocate(), before, tokens, i % 4 == 0 ? "image" : "");
    known.emplace_back(before, std::move(tokens));
    const std::vector<int32_t> wanted = draw(9);
    for (const PrefixId after : {kNoPrefix, kNoRecordedPrefix}) {
      int64_t longest = 0;
      for (const auto& [prefix, contents] : known) {
        const bool begins = prefix == after && contents.size() <= wanted.size() &&
                            std::equal(contents.begin(), contents.end(), wanted.begin());
        if (begins) longest = std::max(longest, std::ssize(contents));
      }
      ASSERT_EQ(pool.LongestKnown(after, wanted), longest);
    }
  }
}

TEST(BlockTableTest, ABegunBlockGoesOnWithOneSequenceAlone) {
  BlockPool pool({.count = 4});
  std::vector<int32_t> tokens(kKvBlockTokens + 10);
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto begin = [&] {
    BlockTable table;
    table.Grow(pool);
    table.Grow(pool);
    table.Remember(pool, tokens);
    table.RememberBegun(pool, tokens);
    return table;
  };
  BlockTable ended = begin();
  const std::vector<int32_t> blocks(ended.blocks().begin(), ended.blocks().end());
  const auto take = [&](BlockTable& table, std::vector<int32_t> wanted) {
    const int64_t known = table.TakeKnown(pool, wanted);
    return known + table.TakeBegun(pool, wanted);
  };
  std::vector<int32_t> longer = tokens;
  longer.insert(longer.end(), {1, 2, 3});
  BlockTable early;
  EXPECT_EQ(take(early, longer), kKvBlockTokens) << "somebody still holds it";
  early.Release(pool);
  ended.Release(pool);
  BlockTable shorter;
  EXPECT_EQ(take(shorter, {tokens.begin(), tokens.end() - 1}), kKvBlockTokens)
      << "a part of what it contains would be overwritten";
  shorter.Release(pool);
  BlockTable next;
  EXPECT_EQ(take(next, longer), std::ssize(tokens));
  EXPECT_EQ(std::vector<int32_t>(next.blocks().begin(), next.blocks().end()), blocks);
  BlockTable second;
  EXPECT_EQ(take(second, longer), kKvBlockTokens);
  second.Release(pool);
  // It grows, is remembered as a whole, and both keys are gone once it is given out again.
  longer.resize(2 * kKvBlockTokens, 5);
  next.Remember(pool, longer);
  next.RememberBegun(pool, longer);
  next.Release(pool);
  EXPECT_EQ(take(second, longer), 2 * kKvBlockTokens);
  second.Release(pool);
  for (int i = 0; i < 4; ++i) pool.Allocate();
  BlockTable last;
  EXPECT_EQ(take(last, longer), 0);
}

TEST(BlockTableTest, NewWeightsForgetBegunBlocks) {
  BlockPool pool({.count = 1});
  BlockTable table;
  table.Grow(pool);
  table.RememberBegun(pool, kTokens);
  pool.Forget();
  table.Release(pool);
  BlockTable next;
  EXPECT_EQ(next.TakeBegun(pool, kTokens), 0);
}

TEST(BlockPoolTest, ABlockIsIdleWhenItsLastHolderReleasesIt) {
  BlockPool pool({.count = 1});
  const int32_t block = *pool.Allocate();
  pool.Remember(block, kNoPrefix, kTokens);
  pool.Find(kNoPrefix, kTokens);
  pool.Release(block);
  EXPECT_EQ(pool.Allocate(), std::nullopt);
  pool.Release(block);
  EXPECT_EQ(pool.Allocate(), block);
  EXPECT_EQ(pool.Find(kNoPrefix, kTokens), std::nullopt) << "its contents are about to change";
}

TEST(BlockPoolTest, EmptyBlocksAreGivenOutBeforeKnownOnesAndThoseByAge) {
  BlockPool pool({.count = 3});
  const int32_t a = *pool.Allocate(), b = *pool.Allocate(), c = *pool.Allocate();
  pool.Remember(a, kNoPrefix, kTokens);
  pool.Remember(b, kNoPrefix, kOther);
  for (const int32_t block : {b, a, c}) pool.Release(block);
  EXPECT_EQ(pool.Allocate(), c);
  EXPECT_EQ(pool.Allocate(), b);
  EXPECT_EQ(pool.Find(kNoPrefix, kTokens)->block, a);
}

TEST(BlockPoolTest, TheFirstBlockWithSomeContentsStaysTheOneThatIsFound) {
  BlockPool pool({.count = 2});
  const int32_t a = *pool.Allocate(), b = *pool.Allocate();
  const PrefixId prefix = pool.Remember(a, kNoPrefix, kTokens);
  EXPECT_EQ(pool.Remember(b, kNoPrefix, kTokens), prefix);
  pool.Release(b);
  EXPECT_EQ(pool.Allocate(), b);
  EXPECT_EQ(pool.Find(kNoPrefix, kTokens)->block, a);
}

TEST(BlockTableTest, FirstBlocksAreGivenBackOnceAndStayKnown) {
  BlockPool pool({.count = 4});
  BlockTable table;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(table.Grow(pool));
  const std::vector<int32_t> tokens(2 * kKvBlockTokens, 5);
  table.Remember(pool, tokens);
  table.DropFirst(pool, 2);
  table.DropFirst(pool, 1);
  EXPECT_EQ(pool.num_held(), 2);
  EXPECT_EQ(table.size(), 4) << "entries stay at their positions";
  BlockTable other;
  EXPECT_EQ(other.TakeKnown(pool, tokens), 2 * kKvBlockTokens);
  EXPECT_EQ(pool.num_held(), 4);
  table.Release(pool);
  EXPECT_EQ(pool.num_held(), 2) << "what the other holds";
  other.Release(pool);
  EXPECT_EQ(pool.num_idle(), 4);
  EXPECT_TRUE(table.Grow(pool));
  table.Release(pool);
  EXPECT_EQ(pool.num_held(), 0) << "a table that is used again holds all of its blocks";
}

TEST(BlockPoolTest, ForgottenContentsAreNotFoundAndPrefixesDoNotReturn) {
  BlockPool pool({.count = 2});
  const int32_t block = *pool.Allocate();
  const PrefixId before = pool.Remember(block, kNoPrefix, kTokens);
  pool.Forget();
  EXPECT_EQ(pool.Find(kNoPrefix, kTokens), std::nullopt);
  EXPECT_EQ(pool.num_held(), 1);
  pool.Release(block);
  const int32_t again = *pool.Allocate();
  EXPECT_NE(pool.Remember(again, kNoPrefix, kTokens), before);
}

}  // namespace
}  // namespace tandem::rollout
