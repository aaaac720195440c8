#include "common/parallel/megatron/parallel_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

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
  EXPECT_THAT(StageGroups(kShape)[1], ElementsAre(12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23));
}

// Two context ranks of three replicas in pairs, and in threes, which cross replicas.
TEST(ParallelMeshTest, ExpertGroupsAreConsecutiveHoldersOfTheSameLayers) {
  MeshShape shape = kShape;
  shape.expert = 2;
  EXPECT_THAT(GradientGroups(shape)[1], ElementsAre(1, 3, 5, 7, 9, 11));
  EXPECT_THAT(ExpertGroups(shape)[4], ElementsAre(5, 7));
  EXPECT_THAT(ExpertGradientGroups(shape)[3], ElementsAre(3, 7, 11));
  shape.expert = 3;
  EXPECT_THAT(ExpertGroups(shape)[2], ElementsAre(1, 3, 5));
  EXPECT_THAT(ExpertGradientGroups(shape)[4], ElementsAre(3, 9));
  for (int rank = 0; rank < shape.size(); ++rank) {
    const MeshCoordinates at = shape.Coordinates(rank);
    for (const std::vector<int>& group : ExpertGroups(shape)) {
      if (std::ranges::find(group, rank) == group.end()) continue;
      EXPECT_EQ(group[static_cast<size_t>(shape.ExpertRank(at))], rank);
    }
    MeshCoordinates first = shape.FirstOfExperts(shape.ExpertRank(at));
    EXPECT_EQ(shape.ExpertRank(first), shape.ExpertRank(at));
    EXPECT_LT(shape.Rank(first), 3 * shape.tensor) << "in the first group";
  }
}

TEST(ParallelMeshTest, EveryRankIsInOneGroupOfEachKind) {
  MeshShape experts = kShape;
  experts.expert = 3;
  for (const auto& groups : {TensorGroups(kShape), ContextGroups(kShape), PipelineGroups(kShape),
                             OutputGroups(kShape), GradientGroups(kShape), StageGroups(kShape),
                             ExpertGroups(experts), ExpertGradientGroups(experts)}) {
    std::vector<int> seen(static_cast<size_t>(kShape.size()));
    for (const std::vector<int>& group : groups) {
      for (const int rank : group) ++seen[static_cast<size_t>(rank)];
    }
    EXPECT_THAT(seen, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace tandem::parallel
