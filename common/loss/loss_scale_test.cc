#include "common/loss/loss_scale.h"

#include <gtest/gtest.h>

#include "common/base/errors/error.h"

namespace tandem::loss {
namespace {

// Two sequences: weights (1, 0.5, 0) and (0, 0), and an empty one.
const std::vector<double> kWeights = {1, 0.5, 0, 0, 0};
const std::vector<int64_t> kLengths = {3, 2, 0};

std::vector<double> Scales(Aggregation aggregation, Normalizer normalizer, double norm = 0) {
  return ComputeLossScales({aggregation, normalizer, norm}, kWeights, kLengths).value().scales;
}

TEST(LossScaleTest, TokenMeanDividesByTheCountOfTheNormalizer) {
  EXPECT_EQ(Scales(Aggregation::kTokenMean, Normalizer::kAllTokens)[0], 1.0 / 5);
  EXPECT_EQ(Scales(Aggregation::kTokenMean, Normalizer::kNonzeroWeight)[0], 1.0 / 2);
  EXPECT_EQ(Scales(Aggregation::kTokenMean, Normalizer::kNonzeroWeight)[1], 0.5 / 2);
  EXPECT_EQ(Scales(Aggregation::kTokenMean, Normalizer::kSumOfWeights)[0], 1.0 / 1.5);
}

TEST(LossScaleTest, SequencesWithoutACountedTokenAreLeftOut) {
  EXPECT_EQ(Scales(Aggregation::kSeqMeanTokenMean, Normalizer::kNonzeroWeight)[0], 1.0 / (1 * 2));
  EXPECT_EQ(Scales(Aggregation::kSeqMeanTokenMean, Normalizer::kAllTokens)[0], 1.0 / (2 * 3));
  EXPECT_EQ(Scales(Aggregation::kSeqMeanTokenSum, Normalizer::kAllTokens)[1], 0.5 / 2);
  EXPECT_EQ(Scales(Aggregation::kSeqMeanTokenSumNorm, Normalizer::kNonzeroWeight, 8)[1], 0.5 / 8);
  EXPECT_EQ(Scales(Aggregation::kTokenSum, Normalizer::kAllTokens)[1], 0.5);
}

TEST(LossScaleTest, WithoutCountedTokensEveryScaleIsZero) {
  const auto scales = ComputeLossScales({}, {0, 0}, {2}).value();
  EXPECT_EQ(scales.total_weight, 0);
  EXPECT_EQ(scales.scales, std::vector<double>({0, 0}));
}

TEST(LossScaleTest, BadInputIsNamed) {
  EXPECT_EQ(FieldPath(ComputeLossScales({}, {1, -1}, {2}).status()), "weights[1]");
  EXPECT_EQ(FieldPath(ComputeLossScales({}, {1, 1}, {1}).status()), "sequence_lengths");
  EXPECT_EQ(FieldPath(ComputeLossScales({}, {1, 1}, {3}).status()), "sequence_lengths");
  EXPECT_EQ(FieldPath(ComputeLossScales({Aggregation::kSeqMeanTokenSumNorm}, {1}, {1}).status()),
            "norm_constant");
}

}  // namespace
}  // namespace tandem::loss
