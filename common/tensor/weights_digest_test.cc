#include "common/tensor/weights_digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace tandem {
namespace {

TEST(WeightsDigestTest, PacksHoldTheSameValuesInTheSameOrder) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat).view({2, 3}).t()},
                                {"b", at::full({4}, 1.5).to(at::kBFloat16)},
                                {"c", at::arange(50, at::kFloat)},
                                {"d", at::full({}, -2.0)}};
  // By the size of a pack; a tensor that is larger is a pack of its own.
  for (const auto& [max_values, packs] :
       std::vector<std::pair<int64_t, int>>{{1, 4}, {10, 3}, {60, 2}, {1000, 1}}) {
    WeightsHasher hasher;
    int visits = 0;
    VisitPacked(tensors, max_values, [&](const at::Tensor& values) {
      hasher.Add(values);
      ++visits;
    });
    EXPECT_EQ(visits, packs) << max_values;
    EXPECT_EQ(hasher.Hex(), WeightsDigest(tensors)) << max_values;
  }
}

TEST(WeightsDigestTest, WhatIsOnTheHostIsNotCopied) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat)}, {"b", at::ones({2})}};
  std::vector<const void*> seen;
  VisitOnHost(tensors, [&](const at::Tensor& values) { seen.push_back(values.const_data_ptr()); });
  EXPECT_EQ(seen, (std::vector<const void*>{tensors[0].second.const_data_ptr(),
                                            tensors[1].second.const_data_ptr()}));
}

}  // namespace
}  // namespace tandem
