#include "services/training_core/sequence_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

SequenceRows RowsOf(std::vector<int32_t> prompt, std::vector<int32_t> response) {
  return SelectSequenceRows(prompt, response, [](size_t) { return true; });
}

TEST(CommonPrefixTest, ItEndsBeforeTheFirstTokenThatDiffersOrIsAskedFor) {
  const SequenceRows first = RowsOf({1, 2, 3, 4}, {5, 6, 7});
  EXPECT_EQ(CommonPrefix(first, RowsOf({1, 2, 3, 4}, {5, 6, 7})), 3) << "the last predicts 5";
  EXPECT_EQ(CommonPrefix(first, RowsOf({1, 2, 9, 4}, {5})), 2);
  EXPECT_EQ(CommonPrefix(first, RowsOf({9, 2, 3, 4}, {5})), 0);
  // A later turn. The model does not read the response's last token.
  EXPECT_EQ(CommonPrefix(first, RowsOf({1, 2, 3, 4, 5, 6, 7, 8, 9}, {5})), 6);
  EXPECT_EQ(CommonPrefix(first, RowsOf({1, 2}, {3})), 1);
}

TEST(CommonPrefixTest, SequencesThatAreNotReadStandBetweenNoOthers) {
  const SequenceRows unread = SelectSequenceRows({1, 2, 3}, {4}, [](size_t) { return false; });
  const SequenceRows read = RowsOf({1, 2, 3}, {4, 5});
  EXPECT_THAT(CommonPrefixes({unread, read, unread, read, read}), ElementsAre(0, 0, 0, 2, 2));
}

TEST(CommonPrefixTest, ItEndsBeforeATokenThatTookOtherExperts) {
  const std::vector<uint16_t> experts[] = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 9, 6, 7}};
  SequenceRows rows[] = {RowsOf({1, 2, 3, 4}, {5}), RowsOf({1, 2, 3, 4}, {6})};
  rows[0].routed_experts = experts[0];
  EXPECT_EQ(CommonPrefix(rows[0], rows[1]), 0) << "whose routers choose";
  rows[1].routed_experts = experts[0];
  EXPECT_EQ(CommonPrefix(rows[0], rows[1]), 3);
  rows[1].routed_experts = experts[1];
  EXPECT_EQ(CommonPrefix(rows[0], rows[1]), 2);
}

TEST(CommonPrefixTest, ItEndsBeforeAnImageThatDiffers) {
  // An image of two tokens behind the first token, another one behind the fourth.
  const auto images = [](const std::string& first, const std::string& second) {
    auto prompt = std::make_shared<PromptImages>();
    prompt->inputs = {{.shape = {.grid = {1, 4, 2}}, .digest = first, .pixels = nullptr},
                      {.shape = {.grid = {1, 4, 2}}, .digest = second, .pixels = nullptr}};
    prompt->found.first_tokens = {1, 4};
    prompt->found.end_tokens = {3, 6};
    return prompt;
  };
  SequenceRows rows[] = {RowsOf({1, 0, 0, 3, 0, 0, 7, 8}, {5}),
                         RowsOf({1, 0, 0, 3, 0, 0, 7, 8}, {5})};
  rows[0].images = images("a", "b");
  const auto with = [&](std::shared_ptr<PromptImages> other) {
    rows[1].images = std::move(other);
    return CommonPrefix(rows[0], rows[1]);
  };
  EXPECT_EQ(with(images("a", "b")), 7);
  EXPECT_EQ(with(images("a", "c")), 4);
  EXPECT_EQ(with(images("c", "b")), 1);
  EXPECT_EQ(with(nullptr), 1);
  const auto wider = images("a", "b");
  wider->inputs[1].shape.grid = {1, 2, 4};
  EXPECT_EQ(with(wider), 4);
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
