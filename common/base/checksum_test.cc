#include "common/base/checksum.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(ChecksumTest, KnownValuesOfTheEmptyInput) {
  // From the reference implementation: `xxhsum -H2 /dev/null` and `xxhsum -H3 /dev/null`.
  EXPECT_EQ(Checksum().Update("", 0).Hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(Xxh3_64("", 0), 0x2d06800538d394c2u);
}

TEST(ChecksumTest, AnySplitGivesTheSameDigest) {
  std::string data(10'000, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31);
  const std::string whole = Checksum().Update(data.data(), data.size()).Hex();
  for (const size_t split : {size_t{0}, size_t{1}, size_t{777}, data.size()}) {
    Checksum checksum;
    checksum.Update(data.data(), split).Update(data.data() + split, data.size() - split);
    EXPECT_EQ(checksum.Hex(), whole) << "split at " << split;
  }
  data[5000] ^= 1;
  EXPECT_NE(Checksum().Update(data.data(), data.size()).Hex(), whole);
}

}  // namespace
}  // namespace tandem
