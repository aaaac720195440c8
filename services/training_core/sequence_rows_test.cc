#include "services/training_core/sequence_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::training {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(SequenceRowsTest, RowsPredictTheNextTokenAndStopAtTheLastThatCounts) {
  const SequenceRows rows =
      SelectSequenceRows({1, 2}, {10, 11, 12, 13}, [](size_t t) { return t == 0 || t == 2; });
  EXPECT_THAT(rows.positions, ElementsAre(1, 3));
  EXPECT_THAT(rows.labels, ElementsAre(10, 12));
  EXPECT_THAT(rows.input, ElementsAre(1, 2, 10, 11));
  const SequenceRows none = SelectSequenceRows({1, 2}, {10}, [](size_t) { return false; });
  EXPECT_THAT(none.input, IsEmpty());
}

TEST(SequenceBatchTest, RowsAreNumberedThroughTheBatch) {
  const SequenceRows two = SelectSequenceRows({1}, {10, 11, 12}, [](size_t t) { return t != 1; });
  const SequenceRows none = SelectSequenceRows({1, 2}, {10}, [](size_t) { return false; });
  const SequenceBatch batch({two, none, two});
  EXPECT_EQ(batch.Rows(batch.all()), (RowRange{.begin = 0, .end = 4}));
  EXPECT_EQ(batch.Rows({.begin = 1, .end = 2}).size(), 0u);
  const std::vector<int> numbers = {0, 1, 2, 3};
  EXPECT_THAT(batch.Rows({.begin = 1, .end = 3}).Of(numbers), ElementsAre(2, 3));
}

}  // namespace
}  // namespace tandem::training
