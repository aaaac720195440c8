#include "common/parallel/parallel_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::parallel {
namespace {

using ::testing::ElementsAre;

// The order that Megatron-LM's documentation of initialize_model_parallel shows ("tp-cp-dp-pp").
constexpr MeshShape kShape = {.tensor = 2, .context = 2, .data = 3, .pipeline = 2};

TEST(ParallelMeshTest, RanksAndCoordinatesAreTheSame) {
  ASSERT_EQ(kShape.size(), 24);
  for (int rank = 0; rank < kShape.size(); ++rank) {
    EXPECT_EQ(kShape.Rank(kShape.Coordinates(rank)), rank);
  }
  EXPECT_EQ(kShape.Rank({.tensor = 1}), 1);
  EXPECT_EQ(kShape.Rank({.context = 1}), 2);
  EXPECT_EQ(kShape.Rank({.data = 1}), 4);
  EXPECT_EQ(kShape.Rank({.pipeline = 1}), 12);
}

TEST(ParallelMeshTest, GroupsAreInOrder) {
  EXPECT_THAT(TensorGroups(kShape)[1], ElementsAre(2, 3));
  EXPECT_THAT(ContextGroups(kShape)[1], ElementsAre(1, 3));
  EXPECT_THAT(PipelineGroups(kShape)[5], ElementsAre(5, 17));
  // Tensor shard 0, divided in two, then tensor shard 1.
  EXPECT_THAT(OutputGroups(kShape)[1], ElementsAre(4, 6, 5, 7));
  EXPECT_THAT(GradientGroups(kShape)[1], ElementsAre(1, 3, 5, 7, 9, 11));
  EXPECT_THAT(EmbeddingGroups({.tensor = 2, .pipeline = 3}),
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5)));
  EXPECT_TRUE(EmbeddingGroups({.tensor = 2, .data = 2}).empty());
}

TEST(ParallelMeshTest, EveryRankIsInOneGroupOfEachKind) {
  for (const auto& groups : {TensorGroups(kShape), ContextGroups(kShape), PipelineGroups(kShape),
                             OutputGroups(kShape), GradientGroups(kShape)}) {
    std::vector<int> seen(static_cast<size_t>(kShape.size()));
    for (const std::vector<int>& group : groups) {
      for (const int rank : group) ++seen[static_cast<size_t>(rank)];
    }
    EXPECT_THAT(seen, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace tandem::parallel
