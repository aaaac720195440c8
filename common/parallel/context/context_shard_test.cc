#include "common/parallel/context/context_shard.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using ::testing::ElementsAre;

RaggedBatch Batch(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<int64_t>> sequences;
  int64_t token = 100;
  for (const int64_t length : lengths) {
    std::vector<int64_t>& sequence = sequences.emplace_back();
    for (int64_t i = 0; i < length; ++i) sequence.push_back(token++);
  }
  return MakeRaggedBatch(sequences);
}

std::vector<int64_t> Numbers(const at::Tensor& x) {
  return {x.const_data_ptr<int64_t>(), x.const_data_ptr<int64_t>() + x.numel()};
}

// Rank i of two holds chunks i and 3 - i; of 5 tokens they are 2, 2, 1 and 0 long.
TEST(ContextShardTest, RanksHoldAnEarlyAndALateChunk) {
  const RaggedBatch whole = Batch({8, 5});
  const ContextShard first = MakeContextShard(whole, 0, 2), second = MakeContextShard(whole, 1, 2);
  EXPECT_THAT(Numbers(first.rows), ElementsAre(0, 1, 6, 7, 8, 9));
  EXPECT_THAT(Numbers(second.rows), ElementsAre(2, 3, 4, 5, 10, 11, 12));
  EXPECT_THAT(Numbers(first.batch.tokens), ElementsAre(100, 101, 106, 107, 108, 109));
  EXPECT_THAT(Numbers(first.batch.positions), ElementsAre(0, 1, 6, 7, 0, 1));
  EXPECT_THAT(Numbers(second.batch.positions), ElementsAre(2, 3, 4, 5, 2, 3, 4));
  EXPECT_THAT(first.batch.offsets, ElementsAre(0, 4, 6));
  EXPECT_THAT(second.batch.offsets, ElementsAre(0, 4, 7));
  EXPECT_EQ(first.batch.positions_end, 8);
  EXPECT_THAT(first.lengths, ElementsAre(8, 5));
  for (const ContextShard& shard : {first, second}) {
    EXPECT_EQ(shard.Chunks(0, 1).early, 2);
    EXPECT_EQ(shard.Chunks(0, 1).late, 0);
    EXPECT_EQ(shard.Chunks(1, 1).early, 2);
    EXPECT_EQ(shard.Chunks(1, 1).late, 1);
    EXPECT_EQ(shard.NumRows(0), 6);
    EXPECT_EQ(shard.NumRows(1), 7);
  }
}

TEST(ContextShardTest, CausalWorkIsTheSameOnEveryRank) {
  const RaggedBatch whole = Batch({64, 128});
  for (int rank = 0; rank < 4; ++rank) {
    const at::Tensor positions = MakeContextShard(whole, rank, 4).batch.positions;
    EXPECT_EQ((positions + 1).sum().item<int64_t>(), (64 * 65 + 128 * 129) / 2 / 4);
  }
}

TEST(ContextShardTest, OneRankHoldsEverything) {
  const RaggedBatch whole = Batch({3, 0, 1});
  const ContextShard shard = MakeContextShard(whole, 0, 1);
  EXPECT_TRUE(at::equal(shard.batch.tokens, whole.tokens));
  EXPECT_TRUE(at::equal(shard.batch.positions, whole.positions));
  EXPECT_EQ(shard.batch.offsets, whole.offsets);
}

// In the last batch some ranks have no row.
const std::vector<std::vector<int64_t>> kBatches = {{1, 2, 3, 7, 64, 130}, {0, 17, 0}, {1}};

class GatherContextRowsTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GatherContextRowsTest, testing::Values(1, 2, 3, 4));

// Every row is on exactly one rank: rows that no rank sent would hold other numbers.
TEST_P(GatherContextRowsTest, PutsTheRowsInTheirPlacesInTheWholeBatch) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    for (const std::vector<int64_t>& lengths : kBatches) {
      const RaggedBatch whole = Batch(lengths);
      const ContextShard shard =
          MakeContextShard(whole, communicator->rank(), communicator->size());
      EXPECT_TRUE(
          at::equal(GatherContextRows(*communicator, shard, shard.batch.tokens), whole.tokens));
      const at::Tensor numbers = at::arange(2 * whole.num_tokens(), at::kFloat).view({-1, 2});
      EXPECT_TRUE(at::equal(
          GatherContextRows(*communicator, shard, numbers.index_select(0, shard.rows)), numbers));
    }
  });
}

TEST_P(GatherContextRowsTest, ScatterGivesEveryRankItsRowsOfTheSum) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    const int ranks = communicator->size();
    for (const std::vector<int64_t>& lengths : kBatches) {
      const RaggedBatch whole = Batch(lengths);
      const ContextShard shard = MakeContextShard(whole, communicator->rank(), ranks);
      const at::Tensor numbers = at::arange(2 * whole.num_tokens(), at::kFloat).view({-1, 2});
      const at::Tensor own =
          ScatterContextRows(*communicator, shard, numbers + communicator->rank());
      const at::Tensor sum = numbers * ranks + ranks * (ranks - 1) / 2;
      EXPECT_TRUE(at::equal(own, sum.index_select(0, shard.rows)));
    }
  });
}

}  // namespace
}  // namespace tandem::parallel
