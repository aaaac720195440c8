#include "common/coauthoring/stop_text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tandem {
namespace {

// Returns the number of pieces up to the one that completes a stop text; 0 if none does.
size_t EndOf(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopTextFinder finder(stops);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (finder.OnText(pieces[i])) return i + 1;
  }
  return 0;
}

TEST(StopTextFinderTest, ATextEndsWithinOrAtTheEndOfAPiece) {
  EXPECT_EQ(EndOf({"b"}, {"a", "abc", "b"}), 2);
  EXPECT_EQ(EndOf({"abc"}, {"a", "abc"}), 2);
  EXPECT_EQ(EndOf({"abc"}, {"ab", "ab", "ca"}), 3);
}

TEST(StopTextFinderTest, ATextStretchesOverManyPieces) {
  EXPECT_EQ(EndOf({"</answer>"}, {"x<", "/", "", "ans", "wer", ">", "more"}), 6);
  EXPECT_EQ(EndOf({"</answer>"}, {"<", "/", "answer", " >", "</", "answer>"}), 6);
}

TEST(StopTextFinderTest, ARepeatedBeginIsFound) {
  EXPECT_EQ(EndOf({"aab"}, {"a", "a", "a", "b"}), 4);
  EXPECT_EQ(EndOf({"\n\nQ"}, {"\n", "\n", "\n", "Q"}), 4);
}

TEST(StopTextFinderTest, TheFirstOfSeveralTextsCounts) {
  EXPECT_EQ(EndOf({"long text", "x"}, {"lon", "g", " te", "xt"}), 4);
  EXPECT_EQ(EndOf({"long text", "g"}, {"lon", "g", " te", "xt"}), 2);
}

TEST(StopTextFinderTest, BytesOfACharacterMayComeOneByOne) {
  EXPECT_EQ(EndOf({"\u00e9"}, {"\xc3", "\xa9"}), 2);
  EXPECT_EQ(EndOf({"\u00e9"}, {"\xc3", "\xa8", "\xa9"}), 0);
}

TEST(StopTextFinderTest, WithoutTextsNothingIsFound) {
  StopTextFinder finder;
  EXPECT_FALSE(finder.active());
  EXPECT_FALSE(finder.OnText("text"));
}

}  // namespace
}  // namespace tandem
