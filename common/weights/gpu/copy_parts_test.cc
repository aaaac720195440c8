#include "common/weights/gpu/copy_parts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tandem {
namespace {

std::vector<WeightSpec> Tensors(const std::vector<int64_t>& values) {
  std::vector<WeightSpec> tensors;
  for (const int64_t count : values) {
    tensors.push_back({.name = std::to_string(tensors.size()), .shape = {count}});
  }
  return tensors;
}

TEST(CopyPartsTest, PartsAreConsecutiveAndEven) {
  EXPECT_EQ(CutIntoParts(Tensors({4, 4, 4, 4}), 2), std::vector<int>({0, 0, 1, 1}));
  EXPECT_EQ(CutIntoParts(Tensors({9, 1, 1, 1}), 2), std::vector<int>({0, 1, 1, 1}));
  EXPECT_EQ(CutIntoParts(Tensors({1, 1, 1, 9}), 2), std::vector<int>({0, 0, 0, 1}));
  EXPECT_EQ(CutIntoParts(Tensors({5, 7}), 1), std::vector<int>({0, 0}));
  EXPECT_EQ(LargestPartBytes(Tensors({9, 1, 1, 1}), 2), 36);
}

TEST(CopyPartsTest, APartMayBeEmpty) {
  EXPECT_EQ(CutIntoParts(Tensors({8}), 3), std::vector<int>({1}));
  EXPECT_EQ(CutIntoParts({}, 3), std::vector<int>());
  EXPECT_EQ(CutIntoParts(Tensors({0, 0}), 3), std::vector<int>({0, 0}));
  EXPECT_EQ(CutIntoParts(Tensors({6, 0}), 3), std::vector<int>({1, 2}));
  EXPECT_EQ(LargestPartBytes(Tensors({8}), 3), 32);
}

TEST(CopyPartsTest, FormsOfATensorStayTogether) {
  std::vector<WeightSpec> tensors = Tensors({2, 4, 4, 2});
  tensors[2].name = tensors[1].name;
  tensors[2].dtype = DType::kBFloat16;
  const std::vector<int> part_of = CutIntoParts(tensors, 2);
  EXPECT_EQ(part_of[1], part_of[2]);
}

}  // namespace
}  // namespace tandem
