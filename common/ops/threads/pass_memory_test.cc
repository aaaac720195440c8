#include "common/ops/threads/pass_memory.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace tandem::ops {
namespace {

class PassMemoryTest : public ::testing::Test {
 protected:
  const c10::InferenceMode inference_mode_;
  PassMemory memory_;
};

TEST_F(PassMemoryTest, AReleasedTensorIsHandedOutAgainInAnotherShape) {
  at::Tensor x = memory_.Empty({4, 6}, at::kFloat);
  const void* const data = x.data_ptr();
  x.reset();
  const at::Tensor y = memory_.Empty({2, 3, 2}, at::kFloat);
  EXPECT_EQ(y.data_ptr(), data);
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 3, 2}));
  EXPECT_TRUE(y.is_contiguous());
  EXPECT_EQ(memory_.kept_bytes(), 24 * 4);
}

TEST_F(PassMemoryTest, ATensorThatIsHeldIsNotHandedOut) {
  const at::Tensor x = memory_.Empty({4}, at::kFloat);
  EXPECT_NE(memory_.Empty({4}, at::kFloat).data_ptr(), x.data_ptr());
}

TEST_F(PassMemoryTest, ATensorOfWhichAViewIsHeldIsNotHandedOut) {
  const PassMemoryScope scope(memory_);
  at::Tensor x = EmptyOnCpu({4, 6});
  const void* const data = x.data_ptr();
  for (const bool of_libtorch : {false, true}) {
    at::Tensor view = of_libtorch ? x.narrow(1, 2, 2) : Narrow(x, 1, 2, 2);
    x.reset();
    EXPECT_NE(EmptyOnCpu({4, 6}).data_ptr(), data);
    view.reset();
    x = memory_.Empty({4, 6}, at::kFloat);
    memory_.Empty({1}, at::kFloat);
  }
  at::Tensor view_of_view = SplitHeads(Narrow(x, 1, 0, 4), 2);
  x.reset();
  EXPECT_EQ(view_of_view.data_ptr(), data);
  EXPECT_NE(EmptyOnCpu({4, 6}).data_ptr(), data);
}

TEST_F(PassMemoryTest, ViewsAreThoseOfLibtorch) {
  const at::Tensor values = at::arange(60, at::kFloat).view({5, 12});
  const PassMemoryScope scope(memory_);
  // The second time views are used again.
  for (int i = 0; i < 2; ++i) {
    for (const bool kept : {true, false}) {
      const at::Tensor x = kept ? EmptyOnCpu({5, 12}) : at::empty({5, 12});
      x.copy_(values);
      EXPECT_TRUE(at::equal(Narrow(x, 0, 1, 3), values.narrow(0, 1, 3)));
      EXPECT_TRUE(at::equal(Narrow(x, 1, 2, 7), values.narrow(1, 2, 7)));
      const auto columns = SplitColumns(x, {6, 2, 4});
      const auto expected = values.split_with_sizes({6, 2, 4}, 1);
      for (size_t j = 0; j < columns.size(); ++j) EXPECT_TRUE(at::equal(columns[j], expected[j]));
      EXPECT_TRUE(at::equal(SplitHeads(columns[0], 2), expected[0].unflatten(1, {3, 2})));
    }
  }
}

TEST_F(PassMemoryTest, AGrowingTensorTakesThePlaceOfTheSmallerOne) {
  for (int64_t size = 1; size <= 64; ++size) memory_.Empty({size}, at::kFloat);
  EXPECT_EQ(memory_.kept_bytes(), 64 * 4);
  memory_.Empty({64}, at::kLong);
  EXPECT_EQ(memory_.kept_bytes(), 64 * 4 + 64 * 8) << "another type has tensors of its own";
}

TEST_F(PassMemoryTest, TheSmallestTensorThatFitsIsTaken) {
  at::Tensor small = memory_.Empty({4}, at::kFloat), large = memory_.Empty({64}, at::kFloat);
  const void* const data = small.data_ptr();
  small.reset();
  large.reset();
  EXPECT_EQ(memory_.Empty({3}, at::kFloat).data_ptr(), data);
}

TEST_F(PassMemoryTest, BesideALargeTensorNothingIsKept) {
  constexpr int64_t kFits = PassMemory::kMaxBytes / 4;
  memory_.Empty({kFits}, at::kFloat);
  EXPECT_EQ(memory_.kept_bytes(), PassMemory::kMaxBytes);
  memory_.Empty({kFits + 1}, at::kFloat);
  EXPECT_EQ(memory_.kept_bytes(), 0);
  const at::Tensor held = memory_.Empty({1}, at::kFloat);
  memory_.Empty({kFits}, at::kFloat);
  EXPECT_EQ(memory_.kept_bytes(), 4);
}

TEST_F(PassMemoryTest, AScopeEnds) {
  const void* data = nullptr;
  {
    const PassMemoryScope scope(memory_);
    data = EmptyOnCpu({8}).data_ptr();
    EXPECT_EQ(EmptyOnCpu({8}).data_ptr(), data);
  }
  const at::Tensor held = EmptyOnCpu({8});
  EXPECT_NE(held.data_ptr(), data);
}

TEST(PassMemoryScopeTest, NeedsInferenceMode) {
  PassMemory memory;
  EXPECT_THROW(PassMemoryScope scope(memory), c10::Error);
  EmptyOnCpu({8});
  EXPECT_EQ(memory.kept_bytes(), 0) << "it is not in use";
}

TEST_F(PassMemoryTest, ResultsOutliveTheMemory) {
  at::Tensor x, view;
  {
    PassMemory memory;
    x = memory.Empty({3}, at::kFloat);
    x.fill_(2);
    view = memory.View(x, {2}, {1}, 1);
  }
  EXPECT_EQ(view.sum().item<float>(), 4);
}

}  // namespace
}  // namespace tandem::ops
