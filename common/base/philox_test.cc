#include "common/base/philox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using ::testing::ElementsAre;

// The vectors of Random123's kat_vectors file.
TEST(PhiloxTest, KnownAnswerOfZeros) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
}

TEST(PhiloxTest, KnownAnswerOfOnes) {
  EXPECT_THAT(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
}

TEST(PhiloxTest, KnownAnswerOfPi) {
  EXPECT_THAT(
      Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST(PhiloxTest, UniformPlacesEveryWordOfKeyAndCounter) {
  // Key (0xa4093822, 0x299f31d0) and counter (0x243f6a88, 0x85a308d3, 0x13198a2e, purpose).
  const uint64_t seed = 0x299f31d0a4093822;
  const uint64_t sample = 0x13198a2e85a308d3;
  const auto words = Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 1}, {0xa4093822, 0x299f31d0});
  const double expected = ((words[0] >> 5) * 67108864.0 + (words[1] >> 6)) / 9007199254740992.0;
  EXPECT_EQ(Uniform(seed, sample, 0x243f6a88, RandomPurpose::kToken), expected);
}

TEST(PhiloxTest, UniformIsInRangeAndBalanced) {
  double sum = 0;
  for (uint32_t t = 0; t < 10000; ++t) {
    const double u = Uniform(7, 3, t, RandomPurpose::kAuthor);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

}  // namespace
}  // namespace tandem
