#include "common/weights/word_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace tandem {
namespace {

std::vector<uint32_t> Words(size_t count) {
  std::vector<uint32_t> words(count);
  for (size_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>(i * 2654435761u + 12345);
  return words;
}

// The formula of docs/adr/0072, word by word.
WordSums Reference(int64_t begin, const std::vector<uint32_t>& words) {
  WordSums sums;
  for (size_t i = 0; i < words.size(); ++i) {
    const int64_t at = begin + static_cast<int64_t>(i);
    const int64_t block = at / kWordsOfBlock, place = at % kWordsOfBlock;
    sums.first += KeyOfBlock(0, block) * WordKeys()[0][place] * words[i];
    sums.second += KeyOfBlock(1, block) * WordKeys()[1][place] * words[i];
  }
  return sums;
}

TEST(WordSumsTest, SumsAreThoseOfTheFormula) {
  for (const int64_t begin : {0, 1, 255, 256, 1000}) {
    for (const size_t count : {0, 1, 3, 4, 5, 255, 256, 257, 2000}) {
      const std::vector<uint32_t> words = Words(count);
      EXPECT_EQ(SumWords(begin, words.data(), static_cast<int64_t>(count)), Reference(begin, words))
          << begin << " " << count;
    }
  }
}

// Ranks hold ranges that begin and end anywhere, and a receiver gets chunks.
TEST(WordSumsTest, RangesAddUpInAnyOrder) {
  const std::vector<uint32_t> words = Words(5000);
  const WordSums whole = SumWords(0, words.data(), 5000);
  for (const int64_t step : {1, 7, 256, 300, 4999}) {
    WordSums sums;
    for (int64_t begin = 5000 - (5000 % step == 0 ? step : 5000 % step); begin >= 0;
         begin -= step) {
      sums += SumWords(begin, words.data() + begin, std::min(step, 5000 - begin));
    }
    EXPECT_EQ(sums, whole) << step;
  }
}

TEST(WordSumsTest, BytesNeedNoAlignment) {
  const std::vector<uint32_t> words = Words(1000);
  std::vector<std::byte> moved(4003);
  std::memcpy(moved.data() + 3, words.data(), 4000);
  EXPECT_EQ(SumWords(0, moved.data() + 3, 1000), SumWords(0, words.data(), 1000));
}

// Digests tell apart what transfers and stores confuse: a bit, two words, two blocks, a sign.
TEST(WordSumsTest, SmallChangesChangeTheDigest) {
  std::vector<uint32_t> words(2048, 0x3f800000);
  words[100] = 0xbf800000;
  std::set<std::string> digests;
  const auto add = [&](const char* name = "w") {
    TensorSums sums;
    sums.AddTensor(name, words.data(), static_cast<int64_t>(words.size()) * 4);
    EXPECT_TRUE(digests.insert(sums.Digest()).second) << digests.size();
  };
  add();
  add("v");
  for (const size_t word : {0, 1, 255, 256, 2047}) {
    for (int bit = 0; bit < 32; ++bit) {
      words[word] ^= uint32_t{1} << bit;
      add();
      words[word] ^= uint32_t{1} << bit;
    }
  }
  std::swap(words[100], words[101]);
  add();
  std::swap(words[101], words[101 + 256]);  // the same place of the next block
  add();
  for (size_t i = 0; i < words.size(); ++i) words[i] ^= 0x80000000;
  add();
}

TEST(WordSumsTest, NamesBelongToTheDigestAndTheirOrderDoesNot) {
  const std::vector<uint32_t> a = Words(10), b = Words(20);
  TensorSums forward, back, swapped;
  forward.AddTensor("a", a.data(), 40);
  forward.AddTensor("b", b.data(), 80);
  back.AddTensor("b", b.data(), 80);
  back.AddTensor("a", a.data(), 40);
  swapped.AddTensor("a", b.data(), 80);
  swapped.AddTensor("b", a.data(), 40);
  EXPECT_EQ(forward.Digest(), back.Digest());
  EXPECT_NE(forward.Digest(), swapped.Digest());
  EXPECT_EQ(forward.Digest().size(), 32);
}

// Tensors of two bytes a value may end in the middle of a word.
TEST(WordSumsTest, ALastShorterWordCounts) {
  const std::vector<unsigned char> bytes = {1, 2, 3, 4, 5, 6, 7};
  std::set<std::string> digests;
  for (int64_t size = 4; size <= 7; ++size) {
    TensorSums sums;
    sums.AddTensor("w", bytes.data(), size);
    EXPECT_TRUE(digests.insert(sums.Digest()).second) << size;
  }
}

}  // namespace
}  // namespace tandem
