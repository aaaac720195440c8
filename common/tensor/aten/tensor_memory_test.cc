#include "common/tensor/aten/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(TensorMemoryTest, ViewsFollowTheMemory) {
  const at::Tensor flat = EmptyWithoutMemory(12, at::kFloat);
  EXPECT_EQ(flat.numel(), 12);
  EXPECT_FALSE(HasMemory(flat));
  AllocateMemory(flat);
  const at::Tensor view = flat.narrow(0, 4, 6).view({2, 3});
  flat.copy_(at::arange(12));
  EXPECT_EQ(view[1][2].item<float>(), 9);

  FreeMemory(flat);
  EXPECT_FALSE(HasMemory(flat));
  EXPECT_FALSE(HasMemory(view));
  AllocateMemory(flat);
  flat.copy_(at::arange(12) + 1);
  EXPECT_EQ(view[1][2].item<float>(), 10);
  EXPECT_EQ(view.storage().unsafeGetStorageImpl(), flat.storage().unsafeGetStorageImpl());
}

TEST(TensorMemoryTest, WhatIsThereStays) {
  const at::Tensor flat = at::arange(5, at::kFloat);
  AllocateMemory(flat);
  EXPECT_EQ(flat[4].item<float>(), 4);
}

// Autograd keeps a weight by its storage: the memory may be another one by the time of the backward
// pass.
TEST(TensorMemoryTest, SavedTensorsSeeTheNewMemory) {
  const at::Tensor weight = EmptyWithoutMemory(3, at::kFloat);
  AllocateMemory(weight);
  weight.fill_(2);
  const at::Tensor x = at::ones({3}).set_requires_grad(true);
  const at::Tensor y = (x * weight).sum();
  FreeMemory(weight);
  AllocateMemory(weight);
  at::from_blob(weight.data_ptr(), {3}, at::kFloat).fill_(5);  // as a collective writes
  y.backward();
  EXPECT_EQ(x.grad()[1].item<float>(), 5);
}

}  // namespace
}  // namespace tandem
