#include "services/training/sequence_rows.h"

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
  EXPECT_THAT(FirstRows({rows, none, rows}), ElementsAre(0, 2, 2, 4));
}

}  // namespace
}  // namespace tandem::training
