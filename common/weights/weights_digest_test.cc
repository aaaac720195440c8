#include "common/weights/weights_digest.h"

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
  // Keyed by the size of a pack; a larger tensor is a pack of its own.
  for (const auto& [max_values, packs] :
       std::vector<std::pair<int64_t, int>>{{1, 4}, {10, 3}, {60, 2}, {1000, 1}}) {
    WeightsHasher hasher;
    int visits = 0;
    const absl::Status visited =
        VisitPacked(SourceOf(tensors), max_values, [&](const at::Tensor& values) {
          hasher.Add(values);
          ++visits;
          return absl::OkStatus();
        });
    EXPECT_TRUE(visited.ok()) << visited;
    EXPECT_EQ(visits, packs) << max_values;
    EXPECT_EQ(hasher.Hex(), WeightsDigest(tensors)) << max_values;
  }
}

TEST(WeightsDigestTest, WhatIsOnTheHostIsNotCopied) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat)}, {"b", at::ones({2})}};
  std::vector<const void*> seen;
  const absl::Status visited = VisitOnHost(SourceOf(tensors), [&](const at::Tensor& values) {
    seen.push_back(values.const_data_ptr());
    return absl::OkStatus();
  });
  EXPECT_TRUE(visited.ok()) << visited;
  EXPECT_EQ(seen, (std::vector<const void*>{tensors[0].second.const_data_ptr(),
                                            tensors[1].second.const_data_ptr()}));
}

TEST(WeightsDigestTest, TensorsMayGoAsSoonAsTheyAreVisited) {
  const NamedTensors tensors = {
      {"a", at::arange(6, at::kFloat)}, {"b", at::ones({2, 2})}, {"c", at::full({3}, 7.0)}};
  const auto source = [&](TensorVisitor visit) -> absl::Status {
    const at::Tensor memory = at::empty({6});  // every tensor has this memory
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor here = memory.narrow(0, 0, tensor.numel()).view(tensor.sizes());
      here.copy_(tensor);
      if (absl::Status visited = visit(name, here); !visited.ok()) return visited;
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(WeightsDigest(source).value(), WeightsDigest(tensors));
  WeightsHasher packed;
  EXPECT_TRUE(VisitPacked(source, 11, [&](const at::Tensor& values) {
                packed.Add(values);
                return absl::OkStatus();
              }).ok());
  EXPECT_EQ(packed.Hex(), WeightsDigest(tensors));
}

TEST(WeightsDigestTest, AnErrorEndsIt) {
  absl::Status lost = absl::UnavailableError("lost");
  EXPECT_EQ(WeightsDigest([&](TensorVisitor) { return lost; }).status(), lost);
  const NamedTensors tensors = {{"a", at::ones({2})}, {"b", at::ones({2})}};
  for (const int64_t max_values : {1, 100}) {
    int visits = 0;
    EXPECT_EQ(VisitPacked(SourceOf(tensors), max_values,
                          [&](const at::Tensor&) {
                            ++visits;
                            return lost;
                          }),
              lost);
    EXPECT_EQ(visits, 1);
  }
}

}  // namespace
}  // namespace tandem
